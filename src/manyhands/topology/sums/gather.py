"""Gather: everyone sends its payload to everyone, and everyone adds.

What goes where, P = 3 (a payload is smaller than what it stands for):

    rank 0   a → 1, a → 2         sum = decode(a) + decode(b) + decode(c)      on every rank, in this order
    rank 1   b → 2, b → 0
    rank 2   c → 0, c → 1

    (P - 1) |payload| bytes sent per rank, and (P - 1) |scales| ahead where all have one scale

Nothing is encoded twice, so whatever a codec promises of one vector holds for each of them. The price grows with P: a
payload of more than 2 / P of the vector costs more than a raw all-reduce.

Reference: H. Xu et al., "GRACE: A Compressed Communication Framework for Distributed Machine Learning", 2021,
https://github.com/sands-lab/grace: codecs whose payloads cannot be added are gathered.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from manyhands.core.flat import Span
from manyhands.core.protocols import Codec, Payload, Saved
from manyhands.core.saving import section, under
from manyhands.core.sending import Sender, over
from manyhands.core.worker import Worker
from manyhands.topology.collectives.group import Outbox
from manyhands.topology.sums.exchange import Exchange, add_decoded, fresh


class Gather:
    """A sum by all-gather.

    Args:
        w: this worker.
        codec: what vectors look like on the wire.
        ranks: who sums; all workers if not given.
    """

    def __init__(self, w: Worker, codec: Codec, ranks: Sequence[int] | None = None) -> None:
        self._w = w
        self._exchange = Exchange(w, ranks, "gather")
        self._sender = Sender(w, codec)
        self._spare = Outbox()
        self.told: Payload = ()
        """What this worker has told last."""

    @torch.no_grad()
    def add_up(self, vector: Tensor, span: Span) -> None:
        """Send to all, decode all."""
        if not span.numel:
            return
        (scale,) = self._exchange.agree(self._sender, vector, [span])
        mine = self.told = fresh(self._sender.encode(vector, span, scale), vector)
        self._exchange.begin()
        for place in self._exchange.others:
            self._exchange.send(place, mine)
        codec = over(self._sender.codec, span, self._w.flat.places)
        add_decoded(self._w, codec, self._exchange.in_order(mine), vector[span.start : span.stop], self._spare)

    def state(self) -> Saved:
        """What was not sent yet."""
        return under("memory", self._sender.state())

    def restore(self, saved: Sequence[Saved]) -> None:
        """Send what this worker, and those whose work it takes over, had not sent yet."""
        for one in self._exchange.inherited(saved):
            self._sender.inherit(section(one, "memory"))
