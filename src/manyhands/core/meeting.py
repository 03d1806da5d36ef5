"""Meeting: nobody goes on before everyone is there. After a gathering, before work goes on.

A gathering alone is no safe start: if its lead dies while it says thanks, some go on to work and others still hand over
to the next lead, and the two wait for each other. Here nobody leads: each tells all others that it is here, and waits
for the same word of each, or for the news of its loss. Whoever has come this far also lets those go who are still in
the last gathering: it tells a lead that this is over, and thanks whoever takes it for the lead.
"""

from __future__ import annotations

from manyhands.core.errors import PeerLost
from manyhands.core.gather import HAND_OVER, OVER, THANKS
from manyhands.core.protocols import Tag, recv
from manyhands.core.worker import Worker

HERE = Tag("here", carries="nothing")


def meet(w: Worker) -> None:
    """Wait until every living worker has called this."""
    number = w.gatherings
    others = [rank for rank in w.crew if rank != w.rank]
    for rank in others:
        w.transport.send(rank, OVER.of(number - 1), latest=True)
        w.transport.send(rank, HERE.of(number))
    for rank in others:
        try:
            _hear(w, rank, number)
        except PeerLost:
            continue


def _hear(w: Worker, rank: int, number: int) -> None:
    """Wait for a rank; if it takes us for the lead of the last gathering, thank it."""
    while True:
        message = recv(w.transport, HERE.of(number), HAND_OVER.of(number - 1), frm=rank)
        if message.tag == HERE.of(number):
            return
        message.release()
        w.transport.send(rank, THANKS.of(number - 1))
