"""Vectors in shards: each server holds the same spans of every vector, by name, and operates on them.

    w [ server 0 | server 1 | server 2 ]        copy, scale, add: each on its own shard, nothing is sent
    g [ server 0 | server 1 | server 2 ]        dot: each gives the sum over its shard, a number
    d [ server 0 | server 1 | server 2 ]

Nothing here sends or waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from manyhands.core.flat import ParamSlot, Span
from manyhands.core.state import StateSlice
from manyhands.core.strategy import Saved
from manyhands.core.vector_ops import VectorOps

BLOCK = 2**16
"""Elements that a dot converts at once: it adds in double precision, and a whole copy of that would be large."""


class Vectors:
    """One shard of all vectors: of each a list of tensors, one per span."""

    def __init__(self, ops: VectorOps, spans: Sequence[Span], weights: Sequence[Tensor]) -> None:
        self._ops = ops
        self.spans = spans
        self._named: dict[str, list[Tensor]] = {"w": [x.clone() for x in weights]}

    def __getitem__(self, name: str) -> list[Tensor]:
        return self._named[name]

    def put(self, name: str, values: list[Tensor]) -> None:
        """Store a vector under a name."""
        self._named[name] = values

    def copy(self, x: str, into: str) -> None:
        """into <- x"""
        self._named[into] = [self._ops.clone(one) for one in self._named[x]]

    def scale(self, a: float, x: str) -> None:
        """x <- a x"""
        for one in self._named[x]:
            self._ops.scale(one, a)

    def add(self, a: float, x: str, to: str) -> None:
        """to <- to + a x"""
        for one, y in zip(self._named[x], self._named[to], strict=True):
            self._ops.add(y, one, scale=a)

    def drop(self, x: str) -> None:
        """Delete x."""
        del self._named[x]

    def dot(self, x: str, y: str) -> float:
        """The contribution of this shard to xᵀy."""
        self._ops.computes(*self._named[x], *self._named[y])
        pairs = zip(self._named[x], self._named[y], strict=True)
        return sum(torch.dot(a.double(), b.double()).item() for pair in pairs for a, b in _blocks(*pair))

    def size(self, x: str) -> float:
        """The contribution of this shard to the sum of |x_i|."""
        self._ops.computes(*self._named[x])
        return sum(one.abs().sum(dtype=torch.float64).item() for one in self._named[x])

    def reach(self, x: str) -> float:
        """The largest |x_i| of this shard."""
        self._ops.computes(*self._named[x])
        return max(one.abs().max().item() for one in self._named[x])

    # -- checkpoints ------------------------------------------------------------------------------

    def state_slices(self, slots: Sequence[ParamSlot], names: Sequence[str]) -> Iterator[StateSlice]:
        """Some vectors by parameter: `fc.weight/s3`."""
        for name in names:
            for values, span in zip(self._named[name], self.spans, strict=True):
                for slot, start, stop in _inside(span, slots):
                    cut = values[start - span.start : stop - span.start]
                    yield StateSlice(f"{slot.name}/{name}", start - slot.span.start, cut)

    def restore(self, slots: Sequence[ParamSlot], saved: Saved) -> None:
        """Load this shard of vectors that were saved whole."""
        for name in {path.rpartition("/")[2] for path in saved}:
            self._named[name] = [torch.empty_like(x) for x in self._named["w"]]
            for values, span in zip(self._named[name], self.spans, strict=True):
                for slot, start, stop in _inside(span, slots):
                    whole = saved[f"{slot.name}/{name}"]
                    values[start - span.start : stop - span.start] = whole[
                        start - slot.span.start : stop - slot.span.start
                    ]


class InOrder:
    """The sum of portions in the order of their numbers, whatever the order of arrival: the same to the last bit."""

    def __init__(self, ops: VectorOps, like: Sequence[Tensor]) -> None:
        self._ops = ops
        self.total = [ops.zeros_like(x) for x in like]
        self._next = 0
        """How many have been added: all before that number."""
        self._early: dict[int, tuple[Tensor, ...]] = {}

    def has(self, number: int) -> bool:
        """Whether this portion has arrived already."""
        return number < self._next or number in self._early

    def is_complete(self, count: int) -> bool:
        """Whether that many portions have arrived."""
        return self._next == count

    def put(self, number: int, values: tuple[Tensor, ...]) -> None:
        """Add a portion, which must be new; one that arrives early is kept until its turn."""
        self._early[number] = values
        while (due := self._early.pop(self._next, None)) is not None:
            for total, x in zip(self.total, due, strict=True):
                self._ops.add(total, x)
            self._next += 1


def _blocks(a: Tensor, b: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    for start in range(0, a.numel(), BLOCK):
        yield a[start : start + BLOCK], b[start : start + BLOCK]


def _inside(span: Span, slots: Sequence[ParamSlot]) -> Iterator[tuple[ParamSlot, int, int]]:
    """The parameters that overlap a span, and the range of the overlap."""
    for slot in slots:
        start, stop = max(span.start, slot.span.start), min(span.stop, slot.span.stop)
        if slot.span.group == span.group and start < stop:
            yield slot, start, stop
