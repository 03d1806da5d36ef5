"""Tree: sums are sent towards the first rank, pair by pair, and the total is sent back along the same tree.

The messages of P = 8 ranks:

    round 1   1→0 3→2 5→4 7→6
    round 2   2→0 6→4
    round 3   4→0
    round 4   0→4
    round 5   0→2 4→6
    round 6   0→1 2→3 4→5 6→7

    down  k = 1, 2, 4, ...:  r with r mod 2k = k sends its sum to r - k
    up    the same in reverse

    T = 2 L lg P + 2 γ m G lg P       2 lg P rounds, m lg P elements sent by the first rank, 2 m (P - 1) by all

The first rank alone makes the total, so all ranks end with the same bits. The second half is the broadcast of
`plain`, and a barrier is both halves without elements: 2 (P - 1) messages in all.

Lending: a rank lends `x` to its parent, whose answer is sent after the release. The total is lent from the outbox,
which is written when all children have sent their sums in this call.

Reference: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in MPICH",
2005, https://doi.org/10.1177/1094342005051521.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from manyhands.collectives.group import Outbox, check_op, copy, vector
from manyhands.collectives.plain import PlainCollective, family
from manyhands.core.port import ReduceOp, Transport


class Tree(PlainCollective):
    """Collectives along a binomial tree, for any number of ranks."""

    def __init__(self, transport: Transport, ranks: Sequence[int]) -> None:
        super().__init__(transport, ranks, "tree")
        self._parent, self._children = family(self._group.index_in_group, self._group.size)
        self._outbox = Outbox()

    def all_reduce(self, x: Tensor, op: ReduceOp = "sum") -> None:
        """Reduce to the first rank, then send the total back."""
        check_op(op)
        x, group = vector(x), self._group
        group.begin()
        for child in self._children:
            group.reduce_into(child, x, op)
        if self._parent is not None:
            group.send(self._parent, x)
            group.copy_into(self._parent, x)
        if self._children:
            total = self._outbox.like(x)
            copy(x, total)
            self._send_down(self._children, total)

    def barrier(self) -> None:
        """An all-reduce of no elements."""
        self.all_reduce(torch.empty(0))
