"""Ring: everyone passes chunks to its neighbour; a chunk collects the sum on one round and tells it on the next.

The chunk that each rank sends to the next, P = 4:

    step              rank 0  rank 1  rank 2  rank 3
    0  reduce              0       1       2       3
    1  reduce              3       0       1       2
    2  reduce              2       3       0       1
    3  gather              1       2       3       0
    4  gather              0       1       2       3
    5  gather              3       0       1       2

    reduce k = 0..P-2:  send chunk r - k, add chunk r - 1 - k       then rank r owns the sum of chunk r + 1
    gather k = 0..P-2:  send chunk r + 1 - k, take chunk r - k      (all modulo P)

    T = 2 L (P - 1) + 2 γ m G (P - 1) / P       2 (P - 1) rounds, 2 m (P - 1) / P elements sent per rank

No algorithm sends less; the price is a latency that grows with P. Every chunk is summed along one way round the
ring, so all ranks end with the same bits.

Lending: the neighbour's release of reduce chunk c is known when c comes back complete, for that neighbour was the
first to add to it. Gathered chunks are lent from the outbox, which is first written when chunk r + 1 arrives: it
started its way at the neighbour, in this call.

Reference: P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009,
https://doi.org/10.1016/j.jpdc.2008.09.002.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from manyhands.core.protocols import Transport
from manyhands.topology.collectives.group import Group, Outbox, copy


class Ring:
    """All-reduce around a ring, for any number of ranks."""

    def __init__(self, transport: Transport, ranks: Sequence[int]) -> None:
        self._group = Group(transport, ranks, "ring")
        self._outbox = Outbox()

    def all_reduce(self, x: Tensor) -> None:
        """Sum in place."""
        x = self._group.begin(x)
        P, r = self._group.size, self._group.place
        if P > 1:
            chunks, lent = x.tensor_split(P), self._outbox.like(x).tensor_split(P)
            self._reduce(chunks, P, r)
            own = (r + 1) % P
            copy(chunks[own], lent[own])
            self._gather(chunks, lent, P, r)

    def _reduce(self, chunks: Sequence[Tensor], P: int, r: int) -> None:
        for k in range(P - 1):
            self._group.send((r + 1) % P, chunks[(r - k) % P])
            self._group.add((r - 1) % P, chunks[(r - 1 - k) % P])

    def _gather(self, chunks: Sequence[Tensor], lent: Sequence[Tensor], P: int, r: int) -> None:
        for k in range(P - 1):
            self._group.send((r + 1) % P, lent[(r + 1 - k) % P])
            c = (r - k) % P
            self._group.take((r - 1) % P, chunks[c], lent[c])
