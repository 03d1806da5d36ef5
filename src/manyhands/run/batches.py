"""Batches: the mini-batches of one replica, from the data that a user passes to `share`.

    map-style    the replica's own random share, epoch after epoch (splits/data.py), as long as a budget grants it
    iterable     every rank reads the whole stream; a round has a mini-batch for each replica, replica r takes the r-th:

        stream   | b0 b1 b2 | b3 b4 b5 | b6 b7         3 replicas: replica 1 takes b1 and b4;
                   round 0    round 1    incomplete    the incomplete round is dropped, so all take the same number

Of a torch DataLoader only the data set, batch size and collate function are used; the order is determined here, and
options that would have no effect are refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, RandomSampler, default_collate

from manyhands.core.budget import Budget
from manyhands.core.errors import Refused, refuse_unless
from manyhands.core.port import Transport
from manyhands.core.task import is_stream
from manyhands.splits.data import Share, tensors_of

Collate = Callable[[list[Any]], Any]

DROPPED = {
    "num_workers": 0,
    "pin_memory": False,
    "drop_last": False,
    "timeout": 0,
    "worker_init_fn": None,
    "multiprocessing_context": None,
    "generator": None,
}
"""Options of a DataLoader that `share` cannot keep, with their defaults."""


@dataclass(frozen=True)
class Source:
    """A data set, its batch size, and the function that collates samples (None: the fastest for this data set)."""

    dataset: Any
    batch_size: int
    collate: Collate | None

    @property
    def is_stream(self) -> bool:
        """Whether samples can only be iterated over, not indexed."""
        return is_stream(self.dataset)

    def steps(self, epochs: float, replicas: int) -> int:
        """The number of mini-batches per replica in these passes, rounded down; at least one."""
        refuse_unless(0 < epochs < math.inf, "epochs", epochs, "> 0 and finite")
        return max(1, math.floor(epochs * len(self.dataset) / (replicas * self.batch_size)))

    def passes(self, epochs: float) -> int:
        """The number of passes over a stream: a whole number, since its length is unknown, and 1 for an iterator."""
        refuse_unless(epochs >= 1 and epochs == int(epochs), "epochs", epochs, "a whole number >= 1 for a stream")
        once = isinstance(self.dataset, Iterator)
        refuse_unless(epochs == 1 or not once, "epochs", epochs, "1: an iterator can be iterated over only once")
        return int(epochs)


def source(dataset: Any, batch_size: int | None, collate: Collate | None) -> Source:
    """The data set, batch size and collate function, taken from a DataLoader if one is given."""
    if isinstance(dataset, DataLoader):
        return _from_loader(dataset, batch_size, collate)
    if batch_size is None:
        raise Refused("batch_size is missing, but must be >= 1")
    refuse_unless(batch_size >= 1, "batch_size", batch_size, ">= 1")
    fits = hasattr(dataset, "__getitem__") or hasattr(dataset, "__iter__")
    refuse_unless(fits, "the data set", f"a {type(dataset).__name__}", "map-style or iterable")
    if collate is None and tensors_of(dataset) is None:
        collate = as_samples
    return Source(dataset, batch_size, collate)


def _from_loader(loader: DataLoader[Any], batch_size: int | None, collate: Collate | None) -> Source:
    if loader.batch_size is None:
        raise Refused(
            "the loader has a batch sampler of its own or none, but must have a batch_size: pass its data set"
        )
    if batch_size not in (None, loader.batch_size):
        raise Refused(f"batch_size is {batch_size}, but the loader's is {loader.batch_size}: pass one of them")
    if not isinstance(loader.dataset, IterableDataset):
        plain = isinstance(loader.sampler, RandomSampler) and not loader.sampler.replacement
        if not plain or loader.sampler.num_samples != len(loader.dataset):  # type: ignore[attr-defined, arg-type]
            raise Refused(
                f"the loader draws by a {type(loader.sampler).__name__}, but must shuffle (shuffle=True): each worker "
                "draws its own samples in its own random order; or pass the data set instead of the loader"
            )
    _refuse_dropped(loader)
    if collate is None and loader.collate_fn is not default_collate:
        collate = loader.collate_fn
    return source(loader.dataset, loader.batch_size, collate)


def _refuse_dropped(loader: DataLoader[Any]) -> None:
    """Refuse options of a loader that `share` does not have."""
    for name, default in DROPPED.items():
        value = getattr(loader, name)
        if value is not default and value != default:
            raise Refused(
                f"the loader has {name}={value}, but share draws samples itself, without it: iterate over "
                "hands.prepare(loader), which keeps all options, or pass the data set to share"
            )


def as_samples(samples: list[Any]) -> Any:
    """Collate to a mini-batch with the structure of a sample: a tuple of fields, a dict, or a single field."""
    batch = default_collate(samples)
    return tuple(batch) if type(samples[0]) in (tuple, list) else batch


def granted(share: Share, budget: Budget, transport: Transport) -> Iterator[Any]:
    """Mini-batches of a share, as long as the budget grants them."""
    while budget.grant(transport):
        yield share.next_batch()


def rounds(source: Source, replica: int, replicas: int, passes: int | None) -> Iterator[Any]:
    """A replica's mini-batch of every complete round, for some passes over the stream, or without end."""
    collate = source.collate or as_samples
    size, begin = replicas * source.batch_size, replica * source.batch_size
    for _ in count() if passes is None else range(passes):
        samples: list[Any] = []
        index = -1
        for index, sample in enumerate(source.dataset):
            if begin <= index % size < begin + source.batch_size:
                samples.append(sample)
            if index % size == size - 1:
                yield collate(samples)
                samples = []
        bound = f">= {size}, replicas x batch_size"
        refuse_unless(index + 1 >= size, "the number of samples in a pass over the stream", index + 1, bound)
