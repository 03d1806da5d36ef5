"""Gather: every worker sends something to the lead, the lowest living worker rank, which collects it.

    worker --- GATHER_PART[round] ---> lead         the lead has the parts of all living workers
    worker <-- GATHER_ACK[round]  ---- lead         only then does a worker return, so that gather is also a barrier

Ranks may be lost at any moment. A lost worker is left out; if the lead is lost, the next rank becomes the lead. When a
lead is lost while it sends its acknowledgements, some workers are already in the next round, and the parts it collected
are lost. So rounds are numbered. A worker that is ahead tells the new lead that the last round is over (GATHER_OVER); a
new lead that is ahead acknowledges the parts of the last round. No two workers can be more than one round apart.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from manyhands.core.errors import PeerLost
from manyhands.core.port import Message, Meta, Tag, recv
from manyhands.core.worker import Worker

GATHER_PART = Tag("gather-part")
GATHER_ACK = Tag("gather-ack", carries="nothing")
GATHER_OVER = Tag("gather-over", carries="nothing")

Gathered = dict[int, tuple[Meta, tuple[Tensor, ...]]]
"""What each worker sent, by rank."""


def gather(w: Worker, meta: Meta = (), tensors: Sequence[Tensor] = ()) -> Gathered | None:
    """What every living worker passed in, by rank, on the lead; None on the others. Acts as a barrier."""
    number, w.gather_round = w.gather_round, w.gather_round + 1
    while True:
        lead = w.lead
        if lead == w.rank:
            return _collect(w, number, meta, tensors)
        if number and lead != w.workers[0]:
            w.transport.send(lead, GATHER_OVER.of(number - 1), latest=True)
        w.transport.send(lead, GATHER_PART.of(number), meta, tensors)
        try:
            recv(w.transport, GATHER_ACK.of(number), frm=lead)
            return None
        except PeerLost as loss:
            if loss.why == "left":
                return None


def _collect(w: Worker, number: int, meta: Meta, tensors: Sequence[Tensor]) -> Gathered | None:
    """Receive and acknowledge the parts; None if an earlier lead has completed this round."""
    gathered: Gathered = {w.rank: (meta, tuple(tensors))}
    is_over = False
    for rank in [member for member in w.members if member != w.rank]:
        try:
            message = _receive(w, rank, number)
        except PeerLost:
            continue
        if message.tag == GATHER_OVER.of(number):
            is_over = True
        else:
            gathered[rank] = message.meta, message.keep()
    for rank in gathered:
        if rank != w.rank:
            w.transport.send(rank, GATHER_ACK.of(number))
    return None if is_over else dict(sorted(gathered.items()))


def _receive(w: Worker, rank: int, number: int) -> Message:
    """A rank's part of this round, or its notice that the round is over; a part of the last round is acknowledged."""
    while True:
        last = GATHER_PART.of(number - 1)
        message = recv(w.transport, GATHER_PART.of(number), GATHER_OVER.of(number), last, frm=rank)
        if message.tag != last:
            return message
        message.release()
        w.transport.send(rank, GATHER_ACK.of(number - 1))


def need_all(w: Worker, gathered: Gathered) -> None:
    """Raise `PeerLost` with its cause if the part of a worker is missing, where no other worker can replace it."""
    for rank in w.workers:
        if rank not in gathered:
            recv(w.transport, GATHER_PART.of(w.gather_round), frm=rank)


@torch.no_grad()
def mean(gathered: Gathered) -> list[Tensor]:
    """The mean of the gathered tensors, summed in rank order."""
    rows = [tensors for _, tensors in gathered.values()]
    return [torch.stack(column).sum(0) / len(rows) for column in zip(*rows, strict=True)]
