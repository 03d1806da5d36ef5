"""Rabenseifner: halve the vector until each rank owns the sum of one block, then double back to the whole.

What each rank sends and to whom, P = 4 and m = 8:

    round         rank 0   rank 1   rank 2   rank 3
    1  halve     4:8 → 2  4:8 → 3  0:4 → 0  0:4 → 1
    2  halve     2:4 → 1  0:2 → 0  6:8 → 3  4:6 → 2
       owns          0:2      2:4      4:6      6:8
    3  double    0:2 → 1  2:4 → 0  4:6 → 3  6:8 → 2
    4  double    0:4 → 2  0:4 → 3  4:8 → 0  4:8 → 1

    halve   d = P/2, ..., 1:  partner r xor d; keep the lower half if the bit is 0, else the upper; send the other
    double  d = 1, ..., P/2:  swap what you have with the same partner

    T = 2 L lg P + 2 γ m G (P - 1) / P       2 lg P rounds, 2 m (P - 1) / P elements sent per rank

As few bytes as a ring in far fewer rounds. Blocks may be of unequal length, also empty. Each block is summed by one
rank, so all ranks end with the same bits. Other numbers of ranks: see `fold`.

Lending: the half lent to a partner comes back from the same partner, complete. What doubling sends is lent from the
outbox, which is written when halving has heard from every partner in this call.

Reference: R. Rabenseifner, "Optimization of collective reduction operations", 2004,
https://doi.org/10.1007/978-3-540-24685-5_1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from manyhands.core.protocols import Transport
from manyhands.topology.collectives.fold import Fold
from manyhands.topology.collectives.group import Group, Outbox, copy


class Halving(NamedTuple):
    """One step: which part this rank keeps, and which its partner keeps."""

    partner: int
    mine: slice
    theirs: slice


def halvings(r: int, P: int, m: int) -> list[Halving]:
    """The steps of rank r among P, a power of two, over m elements; the last one's `mine` is what r owns."""
    steps, low, high, d = [], 0, m, P // 2
    while d:
        middle = (low + high) // 2
        lower, upper = slice(low, middle), slice(middle, high)
        mine, theirs = (upper, lower) if r & d else (lower, upper)
        steps.append(Halving(r ^ d, mine, theirs))
        low, high, d = mine.start, mine.stop, d // 2
    return steps


class Rabenseifner:
    """All-reduce by recursive halving and doubling, for any number of ranks and elements."""

    def __init__(self, transport: Transport, ranks: Sequence[int]) -> None:
        self._group = Group(transport, ranks, "rabenseifner")
        self._fold = Fold(self._group)
        self._outbox = Outbox()

    def all_reduce(self, x: Tensor) -> None:
        """Sum in place."""
        x = self._group.begin(x)
        if self._group.size > 1 and self._fold.enter(x):
            self._fold.leave(self._halve_and_double(x))

    def _halve_and_double(self, x: Tensor) -> Tensor:
        steps = halvings(self._fold.inner, self._fold.power, x.numel())
        for step in steps:
            partner = self._fold.outer(step.partner)
            self._group.send(partner, x[step.theirs])
            self._group.add(partner, x[step.mine])
        lent = self._outbox.like(x)
        copy(x[steps[-1].mine], lent[steps[-1].mine])
        for number, step in reversed(list(enumerate(steps))):
            partner = self._fold.outer(step.partner)
            self._group.send(partner, lent[step.mine])
            sent_on = number > 0 or self._fold.companion is not None
            self._group.take(partner, x[step.theirs], *([lent[step.theirs]] if sent_on else []))
        return lent
