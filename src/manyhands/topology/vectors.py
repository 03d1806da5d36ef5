"""Vectors in shards: each keeper has the same stretch of every vector, by name, and does what it is told to them.

    w [ keeper 0 | keeper 1 | keeper 2 ]        copy, scale, add: each does its stretch, nothing travels
    g [ keeper 0 | keeper 1 | keeper 2 ]        dot: each gives the sum of its stretch, a number
    d [ keeper 0 | keeper 1 | keeper 2 ]

Nothing here sends or waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from manyhands.core.flat import Place, Span
from manyhands.core.protocols import Saved
from manyhands.core.saving import Piece

BLOCK = 2**16
"""Numbers that a dot takes in at once: it adds in double precision, and a whole copy of that would be large."""


class Vectors:
    """One keeper's stretch of all vectors: a list of tensors each, one per span."""

    def __init__(self, spans: Sequence[Span], weights: Sequence[Tensor]) -> None:
        self.spans = spans
        self._named: dict[str, list[Tensor]] = {"w": [x.clone() for x in weights]}
        self.nbytes = sum(x.nbytes for x in weights)

    def __getitem__(self, name: str) -> list[Tensor]:
        return self._named[name]

    def put(self, name: str, values: list[Tensor]) -> None:
        """Let a name stand for these."""
        self._named[name] = values

    def copy(self, x: str, into: str) -> None:
        """into <- x"""
        self._named[into] = [one.clone() for one in self._named[x]]

    def scale(self, a: float, x: str) -> None:
        """x <- a x"""
        for one in self._named[x]:
            one.mul_(a)

    def add(self, a: float, x: str, to: str) -> None:
        """to <- to + a x"""
        for one, y in zip(self._named[x], self._named[to], strict=True):
            y.add_(one, alpha=a)

    def drop(self, x: str) -> None:
        """Forget x."""
        del self._named[x]

    def dot(self, x: str, y: str) -> float:
        """This stretch's part of xᵀy."""
        pairs = zip(self._named[x], self._named[y], strict=True)
        return sum(torch.dot(a.double(), b.double()).item() for pair in pairs for a, b in _blocks(*pair))

    def size(self, x: str) -> float:
        """This stretch's part of the sum of |x_i|."""
        return sum(one.abs().sum(dtype=torch.float64).item() for one in self._named[x])

    def reach(self, x: str) -> float:
        """The largest |x_i| of this stretch."""
        return max(one.abs().max().item() for one in self._named[x])

    # -- checkpoints ------------------------------------------------------------------------------

    def pieces(self, places: Sequence[Place], names: Sequence[str]) -> Iterator[Piece]:
        """Some vectors by parameter: `fc.weight/s3`."""
        for name in names:
            for values, span in zip(self._named[name], self.spans, strict=True):
                for place, start, stop in _inside(span, places):
                    cut = values[start - span.start : stop - span.start]
                    yield Piece(f"{place.name}/{name}", start - place.span.start, cut)

    def restore(self, places: Sequence[Place], saved: Saved) -> None:
        """This stretch of vectors that were saved whole."""
        for name in {path.rpartition("/")[2] for path in saved}:
            self._named[name] = [torch.empty_like(x) for x in self._named["w"]]
            for values, span in zip(self._named[name], self.spans, strict=True):
                for place, start, stop in _inside(span, places):
                    whole = saved[f"{place.name}/{name}"]
                    values[start - span.start : stop - span.start] = whole[
                        start - place.span.start : stop - place.span.start
                    ]


class InOrder:
    """The sum of portions in the order of their numbers, whatever order they come in: the same to the last bit."""

    def __init__(self, like: Sequence[Tensor]) -> None:
        self.total = [torch.zeros_like(x) for x in like]
        self._next = 0
        """How many have been added up: all before that number."""
        self._early: dict[int, tuple[Tensor, ...]] = {}

    def has(self, number: int) -> bool:
        """Whether this one has come already."""
        return number < self._next or number in self._early

    def is_complete(self, count: int) -> bool:
        """Whether so many have come."""
        return self._next == count

    def put(self, number: int, values: tuple[Tensor, ...]) -> None:
        """Take one in, which must be new; what comes before its turn is kept until then."""
        self._early[number] = values
        while (due := self._early.pop(self._next, None)) is not None:
            for total, x in zip(self.total, due, strict=True):
                total.add_(x)
            self._next += 1


def _blocks(a: Tensor, b: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    for start in range(0, a.numel(), BLOCK):
        yield a[start : start + BLOCK], b[start : start + BLOCK]


def _inside(span: Span, places: Sequence[Place]) -> Iterator[tuple[Place, int, int]]:
    """The parameters that reach into a span, and from where to where."""
    for place in places:
        start, stop = max(span.start, place.span.start), min(span.stop, place.span.stop)
        if place.span.part == span.part and start < stop:
            yield place, start, stop
