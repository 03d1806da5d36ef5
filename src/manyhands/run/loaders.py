"""Loaders: a DataLoader of the user's own, of which each worker draws its part.

    batches of the loader    b0 b1 b2 b3 b4 b5 b6     3 workers: worker 1 draws b1 and b4; the last round is filled
                             | round  | round  |      up with b0 and b1, so that all workers draw equally many

Everything else of the loader stays: its workers, pinning, prefetching, collate function, sampler and `drop_last`. A
sampler that shuffles gets the same random order on every worker, another one in each pass; any other sampler must draw
the same batches on every worker, as one does that draws nothing at random or is seeded by the script.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from manyhands.core.errors import Refused
from manyhands.splits.data import mixed

log = logging.getLogger("manyhands")

COPIED = ("num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "persistent_workers")
"""Arguments of a DataLoader that its part has, too."""


class PartOfBatches(Sampler[list[int]]):
    """Every n-th batch of a batch sampler.

    Args:
        batches: what the loader draws by.
        seed: determines the order, if a random sampler has no generator of its own.
        part: the number of this worker.
        parts: how many workers there are.
        even: whether all workers must draw equally many.
    """

    def __init__(self, batches: Any, seed: int, part: int, parts: int, even: bool) -> None:
        self._batches, self._seed, self._part, self._parts, self._even = batches, seed, part, parts, even
        self._sampler = getattr(batches, "sampler", None)
        self._shuffles = getattr(self._sampler, "generator", 0) is None
        self.passes = 0
        """How many passes have begun."""

    def __iter__(self) -> Iterator[list[int]]:
        if self._shuffles:
            self._sampler.generator = torch.Generator().manual_seed(mixed(self._seed, self.passes))  # type: ignore[union-attr]
        self.passes += 1
        return dealt(iter(self._batches), self._part, self._parts, self._even)

    def __len__(self) -> int:
        whole, rest = divmod(len(self._batches), self._parts)
        return whole + (rest > 0 if self._even else rest > self._part)


def dealt(batches: Iterator[Any], part: int, parts: int, even: bool) -> Iterator[Any]:
    """The batch of one worker in each round; if `even`, an incomplete round is filled up with the first batches."""
    first: list[Any] = []
    while round_ := list(islice(batches, parts)):
        if len(first) < parts:
            first = round_
        if even and len(round_) < parts:
            round_ += [first[number % len(first)] for number in range(parts - len(round_))]
        if part < len(round_):
            yield round_[part]


class PartOfStream:
    """A loader of an iterable data set: every worker reads it, and takes every n-th batch."""

    def __init__(self, loader: DataLoader[Any], part: int, parts: int, even: bool) -> None:
        self._loader, self._part, self._parts, self._even = loader, part, parts, even

    def __iter__(self) -> Iterator[Any]:
        return dealt(iter(self._loader), self._part, self._parts, self._even)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def part_of(loader: DataLoader[Any], seed: int, part: int, parts: int, even: bool) -> Any:
    """The part of a loader that one of several workers draws."""
    if parts == 1:
        return loader
    if isinstance(loader.dataset, IterableDataset):
        return PartOfStream(loader, part, parts, even)
    if loader.batch_sampler is None:
        raise Refused("the loader has no batches (batch_size=None), but must have: they are divided among the workers")
    if even and part == 0 and (rest := len(loader) % parts):
        log.info("each pass ends with %d of its first batches again, so that all workers take as many", parts - rest)
    knobs = {name: getattr(loader, name) for name in COPIED}
    if loader.num_workers:
        knobs["prefetch_factor"] = loader.prefetch_factor
    batches = PartOfBatches(loader.batch_sampler, seed, part, parts, even)
    return DataLoader(
        loader.dataset, batch_sampler=batches, collate_fn=loader.collate_fn, generator=loader.generator, **knobs
    )
