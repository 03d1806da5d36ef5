"""Ring: each rank sends chunks to the next one; a chunk is summed on the first round and distributed on the second.

The chunk that each rank sends to the next, P = 4:

    step              rank 0  rank 1  rank 2  rank 3
    0  reduce              0       1       2       3
    1  reduce              3       0       1       2
    2  reduce              2       3       0       1
    3  gather              1       2       3       0
    4  gather              0       1       2       3
    5  gather              3       0       1       2

    reduce k = 0..P-2:  send chunk r - k, add chunk r - 1 - k       then rank r has the sum of chunk r + 1
    gather k = 0..P-2:  send chunk r + 1 - k, copy chunk r - k      (all modulo P)

    T = 2 L (P - 1) + 2 γ m G (P - 1) / P       2 (P - 1) rounds, 2 m (P - 1) / P elements sent per rank

No algorithm sends less; the price is a latency that grows with P. Every chunk is summed in one order along the ring,
so all ranks end with the same bits.

reduce_scatter is the first half and all_gather the second, with chunks counted from r - 1 and r, so that rank r has
chunk r: half the rounds and half the elements.

Lending: the neighbour has released reduce chunk c when c arrives complete, because that neighbour was the first to add
to it. Gathered chunks are lent from the outbox, which is first written when chunk r + 1 arrives: the neighbour was the
first to send it in this call.

Reference: P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009,
https://doi.org/10.1016/j.jpdc.2008.09.002.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from manyhands.collectives.group import Outbox, check_length, check_op, copy, vector
from manyhands.collectives.plain import PlainCollective
from manyhands.core.port import ReduceOp, Transport


class Ring(PlainCollective):
    """Collectives around a ring, for any number of ranks."""

    def __init__(self, transport: Transport, ranks: Sequence[int]) -> None:
        super().__init__(transport, ranks, "ring")
        P, r = self._group.size, self._group.index_in_group
        self._next, self._previous = (r + 1) % P, (r - 1) % P
        self._outbox = Outbox()

    def all_reduce(self, x: Tensor, op: ReduceOp = "sum") -> None:
        """Both rounds, in place."""
        check_op(op)
        x, group = vector(x), self._group
        group.begin()
        P, r = group.size, group.index_in_group
        if P == 1:
            return
        spans, outbox = self._spans(x), self._outbox.like(x)
        chunks, lent = [x[span] for span in spans], [outbox[span] for span in spans]
        for k in range(P - 1):
            group.send(self._next, chunks[(r - k) % P])
            group.reduce_into(self._previous, chunks[(r - 1 - k) % P], op)
        copy(chunks[self._next], lent[self._next])
        for k in range(P - 1):
            group.send(self._next, lent[(r + 1 - k) % P])
            group.copy_into(self._previous, chunks[(r - k) % P], lent[(r - k) % P])

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """The first round; each sum is new memory, lent and not written again."""
        x, group = vector(x), self._group
        group.begin()
        P, r, spans = group.size, group.index_in_group, self._spans(x)
        total = x[spans[self._previous]].clone()
        for k in range(P - 1):
            group.send(self._next, total)
            total = group.reduced(self._previous, x[spans[(r - 2 - k) % P]])
        return total

    def all_gather(self, mine: Tensor, out: Tensor) -> None:
        """The second round; each chunk is copied to new memory, from which it is sent to the next rank."""
        mine, out, group = vector(mine), vector(out), self._group
        group.begin()
        P, r, spans = group.size, group.index_in_group, self._spans(out)
        check_length("mine", mine, spans[r])
        copy(mine, out[spans[r]])
        lent = mine.clone()
        for k in range(P - 1):
            group.send(self._next, lent)
            chunk = out[spans[(r - 1 - k) % P]]
            lent = torch.empty_like(chunk)
            group.copy_into(self._previous, chunk, lent)
