"""Data shards: which samples a rank draws, and in which order.

Rank r of P owns the samples r, r + P, r + 2P, ... and passes over them repeatedly, each time in a new order;
mini-batches are cut from the concatenation of all passes, so that each of them is full:

    5 samples owned, batch_size 3     pass 0: c a e d b   pass 1: b e c a d   ...
                                             |-----|-----------|-----|-------
    batch                                       0       1         2      3

If the data set is not divided (`whole`), each rank passes over all samples, in its own order. The order of a pass
depends only on (seed, rank, pass), so the position is one number, the count of batches drawn, and a run can resume
from it directly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset, default_collate

from manyhands.core.errors import Refused, refuse_unless
from manyhands.core.strategy import Batch


class Share:
    """The endless sequence of mini-batches of one rank.

    Args:
        dataset: any map-style data set; one that has `.tensors` is indexed a whole batch at once.
        rank: the rank whose samples these are.
        size: how many ranks share the data set.
        batch_size: samples per mini-batch.
        seed: determines, with the rank, the order of every pass.
        put_together: makes a mini-batch of a list of samples; by default `collate`, which makes a tuple of tensors.
        whole: whether every rank owns all samples, each in its own order.
    """

    def __init__(
        self,
        dataset: Any,
        rank: int,
        size: int,
        batch_size: int,
        seed: int,
        put_together: Callable[[list[Any]], Any] | None = None,
        whole: bool = False,
    ) -> None:
        samples = len(dataset)
        refuse_unless(batch_size >= 1, "batch_size", batch_size, ">= 1")
        refuse_unless(size >= 1, "size", size, ">= 1")
        refuse_unless(0 <= rank < size, "rank", rank, f">= 0 and < {size}")
        if size > samples:
            raise Refused(f"a data set of {samples} samples cannot be shared by {size} workers")
        self.dataset = dataset
        self.rank = rank
        self.size = size
        self.batch_size = batch_size
        self.seed = seed
        self._mine = range(samples) if whole else range(rank, samples, size)
        self.owned = len(self._mine)
        self._put_together = put_together or collate
        self._tensors = tensors_of(dataset) if put_together is None else None
        self._pass = -1
        self._order = torch.empty(0, dtype=torch.long)
        self._position = 0

    @property
    def position(self) -> int:
        """How many batches were drawn; set it to continue from there."""
        return self._position

    @position.setter
    def position(self, batches: int) -> None:
        refuse_unless(batches >= 0, "position", batches, ">= 0")
        self._position = batches

    def next_batch(self) -> Any:
        """Draw the next mini-batch, and advance the position."""
        index = self._next_index()
        if self._tensors is not None:
            batch = tuple(field[index] for field in self._tensors)
        else:
            batch = self._put_together([self.dataset[i] for i in index.tolist()])
        self._position += 1
        return batch

    def _next_index(self) -> Tensor:
        index = self._position * self.batch_size
        end = index + self.batch_size
        slices = []
        while index < end:
            number, start = divmod(index, self.owned)
            slices.append(self._order_of(number)[start : start + end - index])
            index += len(slices[-1])
        return slices[0] if len(slices) == 1 else torch.cat(slices)

    def _order_of(self, number: int) -> Tensor:
        """The owned samples in the order of one pass; the newest order is cached."""
        if number != self._pass:
            generator = torch.Generator().manual_seed(mixed(self.seed, self.rank, number))
            self._order = torch.randperm(self.owned, generator=generator) * self._mine.step + self._mine.start
            self._pass = number
        return self._order


def mixed(*numbers: int) -> int:
    """One seed of several numbers. Torch's CPU generator uses only the lowest 32 bits, so all are mixed into them."""
    words = [word for number in numbers for word in divmod(number % 2**64, 2**32)]
    return int(np.random.SeedSequence(words).generate_state(1)[0])


def tensors_of(dataset: Any) -> Sequence[Tensor] | None:
    """The fields of a data set that consists of tensors in memory; None if samples must be read one by one."""
    if isinstance(dataset, TensorDataset) and type(dataset).__getitem__ is not TensorDataset.__getitem__:
        return None  # a subclass that changes its samples
    fields = getattr(dataset, "tensors", None)
    if not isinstance(fields, tuple | list) or not fields:
        return None
    whole = all(isinstance(field, Tensor) and field.dim() and len(field) == len(dataset) for field in fields)
    return fields if whole else None


def collate(samples: list[Any]) -> Batch:
    """Make one mini-batch of samples that were read one by one."""
    if isinstance(samples[0], dict):
        raise Refused("a sample is a dict, but must be a tuple of fields, the last one the target")
    if not isinstance(samples[0], tuple | list):
        samples = [(sample,) for sample in samples]
    batch = tuple(default_collate(samples))
    for number, (field, example) in enumerate(zip(batch, samples[0], strict=True)):
        if not isinstance(field, Tensor):
            raise Refused(f"field {number} of a sample is a {type(example).__name__}, but must be a tensor or a number")
    return batch
