"""Tree: sums flow down to the first rank, pair by pair, and the total flows back the same way.

Who sends to whom, P = 8:

    round 1   1→0 3→2 5→4 7→6
    round 2   2→0 6→4
    round 3   4→0
    round 4   0→4
    round 5   0→2 4→6
    round 6   0→1 2→3 4→5 6→7

    down  k = 1, 2, 4, ...:  r with r mod 2k = k sends its sum to r - k
    up    the same in reverse

    T = 2 L lg P + 2 γ m G lg P       2 lg P rounds, m lg P elements sent by the first rank, 2 m (P - 1) by all

The first rank alone makes the total, so all ranks end with the same bits. On the way back a rank lets one message
leave before it sends the next: the deepest branch goes first and gets the whole link.

Lending: a rank lends `x` to its parent, whose answer comes after the release. The total is lent from the outbox,
which is written when all children have reported in this call.

Reference: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in MPICH",
2005, https://doi.org/10.1177/1094342005051521.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from manyhands.core.protocols import Transport
from manyhands.topology.collectives.group import Group, Outbox, copy


def family(place: int, size: int) -> tuple[int | None, list[int]]:
    """The parent of a place in the binomial tree, and its children, leaves first."""
    children, k = [], 1
    while k < size and place % (2 * k) == 0:
        if place + k < size:
            children.append(place + k)
        k *= 2
    return (place - k if place else None), children


class Tree:
    """All-reduce along a binomial tree, for any number of ranks."""

    def __init__(self, transport: Transport, ranks: Sequence[int]) -> None:
        self._group = Group(transport, ranks, "tree")
        self._parent, self._children = family(self._group.place, self._group.size)
        self._outbox = Outbox()

    def all_reduce(self, x: Tensor) -> None:
        """Sum in place."""
        x = self._group.begin(x)
        for child in self._children:
            self._group.add(child, x)
        if self._parent is not None:
            self._group.send(self._parent, x)
            self._group.take(self._parent, x)
        if self._children:
            self._tell(x)

    def _tell(self, x: Tensor) -> None:
        total = self._outbox.like(x)
        copy(x, total)
        deepest, *others = reversed(self._children)
        self._group.send(deepest, total)
        for child in others:
            self._group.transport.flush()
            self._group.send(child, total)
