"""Gathering at the lead: every worker hands something over, the lowest rank still there collects it.

Ranks may die meanwhile: a dead worker is left out, a dead lead is followed by the next rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from manyhands.core.errors import PeerLost
from manyhands.core.protocols import Meta, Tag, recv
from manyhands.core.worker import Worker

HAND_OVER = Tag("hand-over")
THANKS = Tag("thanks")

Gathered = dict[int, tuple[Meta, tuple[Tensor, ...]]]


def gather(w: Worker, meta: Meta = (), tensors: Sequence[Tensor] = ()) -> Gathered | None:
    """What every living worker handed over, by rank, on the lead; None on the others. Acts as a barrier."""
    while True:
        lead = w.lead
        if lead == w.rank:
            return _collect(w, meta, tensors)
        w.transport.send(lead, HAND_OVER, meta, tensors)
        try:
            recv(w.transport, THANKS, frm=lead)
            return None
        except PeerLost as loss:
            if loss.why == "left":
                return None


def _collect(w: Worker, meta: Meta, tensors: Sequence[Tensor]) -> Gathered:
    gathered: Gathered = {w.rank: (meta, tuple(tensors))}
    for rank in w.transport.peers("worker"):
        try:
            message = recv(w.transport, HAND_OVER, frm=rank)
            gathered[rank] = message.meta, message.keep()
        except PeerLost:
            continue
    for rank in gathered:
        if rank != w.rank:
            w.transport.send(rank, THANKS)
    return dict(sorted(gathered.items()))


@torch.no_grad()
def mean(gathered: Gathered) -> list[Tensor]:
    """The average of what was handed over, summed in rank order."""
    rows = [tensors for _, tensors in gathered.values()]
    return [torch.stack(column).sum(0) / len(rows) for column in zip(*rows, strict=True)]
