"""Loaders: a DataLoader of the user's own, of which each worker draws its part.

    batches of the loader    b0 b1 b2 b3 b4 b5 b6     3 workers: worker 1 draws b1 and b4; the last round is filled
                             | round  | round  |      up with b0 and b1, so that all workers draw equally many

Everything else of the loader stays: its workers, pinning, prefetching, collate function, sampler and `drop_last`. A
sampler that shuffles gets the same random order on every worker, another one in each pass; any other sampler must draw
the same batches on every worker, as one does that draws nothing at random or is seeded by the script.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from manyhands.core.errors import Refused
from manyhands.run.loader_position import LoaderPosition, PositionedLoader
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
        parts: how many workers there are; a single one keeps the order of the loader.
        even: whether all workers must draw equally many.
        position: where this worker is.
    """

    def __init__(self, batches: Any, seed: int, part: int, parts: int, even: bool, position: LoaderPosition) -> None:
        self._batches, self._seed, self._part, self._parts, self._even = batches, seed, part, parts, even
        self._sampler = getattr(batches, "sampler", None)
        self._shuffles = parts > 1 and getattr(self._sampler, "generator", 0) is None
        self._position = position

    def __iter__(self) -> Iterator[list[int]]:
        number = self._position.begin()
        if self._shuffles:
            self._sampler.generator = torch.Generator().manual_seed(mixed(self._seed, number))  # type: ignore[union-attr]
        return dealt(iter(self._batches), self._part, self._parts, self._even, self._position)

    def __len__(self) -> int:
        return _length(len(self._batches), self._part, self._parts, self._even)


def _length(batches: int, part: int, parts: int, even: bool) -> int:
    """How many of these batches one worker draws."""
    whole, rest = divmod(batches, parts)
    return whole + (rest > 0 if even else rest > part)


def dealt(batches: Iterator[Any], part: int, parts: int, even: bool, position: LoaderPosition) -> Iterator[Any]:
    """The batch of one worker in each round; if `even`, an incomplete round is filled up with the first batches."""
    first = position.skip(batches)
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
        self.position = LoaderPosition(parts, (None, loader.batch_size), _generators(loader))

    def __iter__(self) -> Iterator[Any]:
        self.position.begin()
        batches = dealt(iter(self._loader), self._part, self._parts, self._even, self.position)
        return self.position.counted(batches)

    def __len__(self) -> int:
        return _length(len(self._loader), self._part, self._parts, self._even)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def part_of(loader: DataLoader[Any], seed: int, part: int, parts: int, even: bool) -> Any:
    """The part of a loader that one of several workers draws."""
    whole = loader.batch_sampler is None and not isinstance(loader.dataset, IterableDataset)
    if parts == 1 and (whole or type(loader) is not DataLoader):
        return loader
    if isinstance(loader.dataset, IterableDataset):
        return PartOfStream(loader, part, parts, even)
    if whole:
        raise Refused("the loader has no batches (batch_size=None), but must have: they are divided among the workers")
    if even and part == 0 and (rest := len(loader) % parts):
        log.info("each pass ends with %d of its first batches again, so that all workers take as many", parts - rest)
    knobs = {name: getattr(loader, name) for name in COPIED}
    if loader.num_workers:
        knobs["prefetch_factor"] = loader.prefetch_factor
    count = len(loader) if hasattr(loader.batch_sampler, "__len__") else None
    position = LoaderPosition(parts, (count, loader.batch_size), _generators(loader))
    batches = PartOfBatches(loader.batch_sampler, seed, part, parts, even, position)
    found = PositionedLoader(
        loader.dataset, batch_sampler=batches, collate_fn=loader.collate_fn, generator=loader.generator, **knobs
    )
    found.position = position
    return found


def _generators(loader: DataLoader[Any]) -> Sequence[torch.Generator]:
    """The generators that a loader and its samplers were given, each once."""
    places = (loader, loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    found = {id(one): one for place in places if (one := getattr(place, "generator", None)) is not None}
    return list(found.values())
