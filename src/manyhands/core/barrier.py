"""Barrier: no worker continues before all living workers are here. Used after a gather, before training continues.

A gather alone does not make a safe restart: if its lead is lost while it sends acknowledgements, some workers continue
with training while others send their part to the next lead, and each side waits for the other. A barrier has no lead:
each worker sends BARRIER to all others, and waits for the same message from each of them or for its loss.

A worker in the barrier also releases those that are still in the last gather: it tells a possible lead that this round
is over, and acknowledges the part of a worker that takes it for the lead.

The barrier of a `Collective` raises `PeerLost` when a rank is lost; this one leaves lost ranks out, since some methods
continue after the loss of a worker. Therefore it is not one of the collectives.
"""

from __future__ import annotations

from manyhands.core.errors import PeerLost
from manyhands.core.gather import GATHER_ACK, GATHER_OVER, GATHER_PART
from manyhands.core.port import Tag, recv
from manyhands.core.worker import Worker

BARRIER = Tag("worker-barrier", carries="nothing")


def barrier(w: Worker) -> None:
    """Wait until every living worker has called this."""
    number = w.gather_round
    others = [rank for rank in w.members if rank != w.rank]
    for rank in others:
        w.transport.send(rank, GATHER_OVER.of(number - 1), latest=True)
        w.transport.send(rank, BARRIER.of(number))
    for rank in others:
        try:
            _wait_for(w, rank, number)
        except PeerLost:
            continue


def _wait_for(w: Worker, rank: int, number: int) -> None:
    """Wait until a rank is in the barrier; acknowledge its part of the last gather if it takes us for the lead."""
    while True:
        message = recv(w.transport, BARRIER.of(number), GATHER_PART.of(number - 1), frm=rank)
        if message.tag == BARRIER.of(number):
            return
        message.release()
        w.transport.send(rank, GATHER_ACK.of(number - 1))
