"""Gathering at the lead: every worker hands something over, the lowest rank still there collects it.

Ranks may die meanwhile: a dead worker is left out, a dead lead is followed by the next rank. A lead that dies
while it says thanks leaves some ranks in this gathering and some in the next one, and what it had collected is
gone. So gatherings are numbered; who is ahead tells a new lead that the last one is over, and who is behind
hears it from a new lead that is ahead. Nobody can be further away than one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from manyhands.core.errors import PeerLost
from manyhands.core.protocols import Message, Meta, Tag, recv
from manyhands.core.worker import Worker

HAND_OVER = Tag("hand-over")
THANKS = Tag("thanks", carries="nothing")
OVER = Tag("over", carries="nothing")

Gathered = dict[int, tuple[Meta, tuple[Tensor, ...]]]


def gather(w: Worker, meta: Meta = (), tensors: Sequence[Tensor] = ()) -> Gathered | None:
    """What every living worker handed over, by rank, on the lead; None on the others. Acts as a barrier."""
    number, w.gatherings = w.gatherings, w.gatherings + 1
    while True:
        lead = w.lead
        if lead == w.rank:
            return _collect(w, number, meta, tensors)
        if number and lead != w.workers[0]:
            w.transport.send(lead, OVER.of(number - 1), latest=True)
        w.transport.send(lead, HAND_OVER.of(number), meta, tensors)
        try:
            recv(w.transport, THANKS.of(number), frm=lead)
            return None
        except PeerLost as loss:
            if loss.why == "left":
                return None


def _collect(w: Worker, number: int, meta: Meta, tensors: Sequence[Tensor]) -> Gathered | None:
    gathered: Gathered = {w.rank: (meta, tuple(tensors))}
    over = False
    for rank in [one for one in w.crew if one != w.rank]:
        try:
            message = _from(w, rank, number)
        except PeerLost:
            continue
        if message.tag == OVER.of(number):
            over = True
        else:
            gathered[rank] = message.meta, message.keep()
    for rank in gathered:
        if rank != w.rank:
            w.transport.send(rank, THANKS.of(number))
    return None if over else dict(sorted(gathered.items()))


def _from(w: Worker, rank: int, number: int) -> Message:
    """What a rank hands over, or its word that this gathering is over; the one before is, should it still be there."""
    while True:
        last = HAND_OVER.of(number - 1)
        message = recv(w.transport, HAND_OVER.of(number), OVER.of(number), last, frm=rank)
        if message.tag != last:
            return message
        message.release()
        w.transport.send(rank, THANKS.of(number - 1))


def need_all(w: Worker, gathered: Gathered) -> None:
    """Refuse to do without a worker that alone has its part: whoever asks for it hears why it is gone."""
    for rank in w.workers:
        if rank not in gathered:
            recv(w.transport, HAND_OVER.of(w.gatherings), frm=rank)


@torch.no_grad()
def mean(gathered: Gathered) -> list[Tensor]:
    """The average of what was handed over, summed in rank order."""
    rows = [tensors for _, tensors in gathered.values()]
    return [torch.stack(column).sum(0) / len(rows) for column in zip(*rows, strict=True)]
