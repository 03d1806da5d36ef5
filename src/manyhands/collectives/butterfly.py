"""Butterfly, or recursive doubling: in each round every rank swaps its whole sum with a partner twice as far away.

The pairs that swap, P = 8:

    round 1   0↔1 2↔3 4↔5 6↔7
    round 2   0↔2 1↔3 4↔6 5↔7
    round 3   0↔4 1↔5 2↔6 3↔7

    round k = 0..lg P - 1:  partner = r xor 2^k, x <- x + partner's x

    T = L lg P + γ m G lg P       lg P rounds, m lg P elements sent per rank

Nothing has fewer rounds: the choice for small vectors. Partners add the same two numbers, and a + b = b + a to the
last bit, so all ranks end with the same bits. Other numbers of ranks: see `fold`. A barrier is an all-reduce without
elements: P lg P messages instead of the P (P - 1) of `plain`.

Lending: there is no answer to a swap, so `x` itself is never lent. Each round's sum is new memory, lent and not
written again; it lives as long as its receiver needs it.

Reference: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in MPICH",
2005, https://doi.org/10.1177/1094342005051521.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from manyhands.collectives.fold import Fold
from manyhands.collectives.group import check_op, copy, vector
from manyhands.collectives.plain import PlainCollective
from manyhands.core.port import ReduceOp, Transport


class Butterfly(PlainCollective):
    """Collectives by recursive doubling, for any number of ranks."""

    def __init__(self, transport: Transport, ranks: Sequence[int]) -> None:
        super().__init__(transport, ranks, "butterfly")
        self._fold = Fold(self._group)

    def all_reduce(self, x: Tensor, op: ReduceOp = "sum") -> None:
        """Swap in every round, then copy the total."""
        check_op(op)
        x, group, fold = vector(x), self._group, self._fold
        group.begin()
        if group.size == 1 or not fold.enter(x, op):
            return
        total, bit = x.clone(), 1
        while bit < fold.power:
            partner = fold.outer(fold.inner ^ bit)
            group.send(partner, total)
            total = group.reduced(partner, total, op)
            bit *= 2
        fold.leave(total)
        copy(total, x)

    def barrier(self) -> None:
        """An all-reduce of no elements."""
        self.all_reduce(torch.empty(0))
