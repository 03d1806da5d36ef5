"""Butterfly, or recursive doubling: in each round everyone swaps its whole sum with a partner twice as far away.

Who swaps with whom, P = 8:

    round 1   0↔1 2↔3 4↔5 6↔7
    round 2   0↔2 1↔3 4↔6 5↔7
    round 3   0↔4 1↔5 2↔6 3↔7

    round k = 0..lg P - 1:  partner = r xor 2^k, x <- x + partner's x

    T = L lg P + γ m G lg P       lg P rounds, m lg P elements sent per rank

Nothing has fewer rounds: the choice for small vectors. Partners add the same two numbers, and a + b = b + a to the
last bit, so all ranks end with the same bits. Other numbers of ranks: see `fold`.

Lending: nobody answers a swap, so `x` itself is never lent. Each round's sum is new memory, lent and not written
again; it lives as long as its receiver needs it.

Reference: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in MPICH",
2005, https://doi.org/10.1177/1094342005051521.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from manyhands.core.protocols import Transport
from manyhands.topology.collectives.fold import Fold
from manyhands.topology.collectives.group import Group, copy


class Butterfly:
    """All-reduce by recursive doubling, for any number of ranks."""

    def __init__(self, transport: Transport, ranks: Sequence[int]) -> None:
        self._group = Group(transport, ranks, "butterfly")
        self._fold = Fold(self._group)

    def all_reduce(self, x: Tensor) -> None:
        """Sum in place."""
        x = self._group.begin(x)
        if self._group.size > 1 and self._fold.enter(x):
            total = self._swap(x.clone())
            self._fold.leave(total)
            copy(total, x)

    def _swap(self, total: Tensor) -> Tensor:
        bit = 1
        while bit < self._fold.power:
            partner = self._fold.outer(self._fold.inner ^ bit)
            self._group.send(partner, total)
            total = self._group.plus(partner, total)
            bit *= 2
        return total
