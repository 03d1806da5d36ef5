"""Streams: the mini-batches of one replica, out of whatever a user calls data.

    map-style    the replica's own seeded share, walked again and again (splits/data.py), as long as a budget grants
    iterable     every rank walks the stream; a round is one mini-batch for each replica, and replica r takes the r-th:

        stream   | b0 b1 b2 | b3 b4 b5 | b6 b7         3 replicas: replica 1 takes b1 and b4;
                   round 0    round 1    incomplete    the incomplete round is dropped, so all take the same number

A loader of torch is taken apart: its data set, batch size and collate function are used, since the order is ours.
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
from manyhands.core.protocols import Transport
from manyhands.core.task import is_stream
from manyhands.splits.data import Share, tensors_of

PutTogether = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class Source:
    """Samples, how many of them make a mini-batch, and how (None: the fastest way there is)."""

    dataset: Any
    batch_size: int
    put_together: PutTogether | None

    @property
    def is_stream(self) -> bool:
        """Whether samples can only be walked over, not asked for."""
        return is_stream(self.dataset)

    def steps(self, epochs: float, replicas: int) -> int:
        """How many mini-batches per replica these passes give, rounded down; at least one."""
        refuse_unless(0 < epochs < math.inf, "epochs", epochs, "> 0 and finite")
        return max(1, math.floor(epochs * len(self.dataset) / (replicas * self.batch_size)))

    def passes(self, epochs: float) -> int:
        """How many passes over a stream; it has no length that could be divided, and some can be walked only once."""
        refuse_unless(epochs >= 1 and epochs == int(epochs), "epochs", epochs, "a whole number >= 1 for a stream")
        once = isinstance(self.dataset, Iterator)
        refuse_unless(epochs == 1 or not once, "epochs", epochs, "1: an iterator can be walked only once")
        return int(epochs)


def source(dataset: Any, batch_size: int | None, collate: PutTogether | None) -> Source:
    """What to read, taken from a loader if there is one."""
    if isinstance(dataset, DataLoader):
        return _taken_apart(dataset, batch_size, collate)
    if batch_size is None:
        raise Refused("batch_size is missing, but must be >= 1")
    refuse_unless(batch_size >= 1, "batch_size", batch_size, ">= 1")
    fits = hasattr(dataset, "__getitem__") or hasattr(dataset, "__iter__")
    refuse_unless(fits, "the data set", f"a {type(dataset).__name__}", "map-style or iterable")
    if collate is None and tensors_of(dataset) is None:
        collate = as_samples
    return Source(dataset, batch_size, collate)


def _taken_apart(loader: DataLoader[Any], batch_size: int | None, collate: PutTogether | None) -> Source:
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
                "walks over samples of its own, in an order of its own; pass the data set to have it so"
            )
    if collate is None and loader.collate_fn is not default_collate:
        collate = loader.collate_fn
    return source(loader.dataset, loader.batch_size, collate)


def as_samples(samples: list[Any]) -> Any:
    """A mini-batch that looks like a sample: a tuple of fields, a dict, or a single field."""
    batch = default_collate(samples)
    return tuple(batch) if type(samples[0]) in (tuple, list) else batch


def granted(share: Share, budget: Budget, transport: Transport) -> Iterator[Any]:
    """Mini-batches of a share, as long as the budget lasts."""
    while budget.grant(transport):
        yield share.next_batch()


def rounds(source: Source, replica: int, replicas: int, passes: int | None) -> Iterator[Any]:
    """A replica's mini-batch of every complete round, for some passes over the stream, or for ever."""
    together = source.put_together or as_samples
    size, begin = replicas * source.batch_size, replica * source.batch_size
    for _ in count() if passes is None else range(passes):
        mine: list[Any] = []
        place = -1
        for place, sample in enumerate(source.dataset):
            if begin <= place % size < begin + source.batch_size:
                mine.append(sample)
            if place % size == size - 1:
                yield together(mine)
                mine = []
        bound = f">= {size}, replicas x batch_size"
        refuse_unless(place + 1 >= size, "the number of samples in a pass over the stream", place + 1, bound)
