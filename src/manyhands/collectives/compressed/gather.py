"""Gather: every rank sends its payload to all others, and every rank adds all of them.

The messages of P = 3 (a payload is smaller than the vector that it encodes):

    rank 0   a → 1, a → 2         sum = decode(a) + decode(b) + decode(c)      on every rank, in this order
    rank 1   b → 2, b → 0
    rank 2   c → 0, c → 1

    (P - 1) |payload| bytes sent per rank, after a max-reduce of the scales where all have a common one

Nothing is encoded twice, so what a codec guarantees for one vector holds for each of them. The price grows with P: a
payload of more than 2 / P of the vector costs more than a raw all-reduce.

Reference: H. Xu et al., "GRACE: A Compressed Communication Framework for Distributed Machine Learning", 2021,
https://github.com/sands-lab/grace: codecs whose payloads cannot be added are gathered.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from manyhands.collectives.compressed.exchange import (
    ALL_TOUCHED,
    PayloadExchange,
    Untouched,
    add_decoded,
    fresh,
    unsent,
)
from manyhands.collectives.group import Outbox
from manyhands.core.codec import Codec, Payload
from manyhands.core.encoder import Encoder, codec_for_span
from manyhands.core.flat import Span
from manyhands.core.state import under
from manyhands.core.strategy import Saved
from manyhands.core.worker import Worker


class Gather:
    """A sum by all-gather.

    Args:
        w: this worker.
        codec: how vectors are encoded.
        ranks: the ranks that sum; all workers if not given.
    """

    def __init__(self, w: Worker, codec: Codec, ranks: Sequence[int] | None = None) -> None:
        self._w = w
        self._exchange = PayloadExchange(w, ranks, "gather")
        self._encoder = Encoder(w, codec)
        self._spare = Outbox()
        self.last_payload: Payload = ()
        """What this worker has sent last."""

    @torch.no_grad()
    def all_reduce(self, vector: Tensor, span: Span, untouched: Untouched | None = None) -> Untouched:
        """Send to all, decode all."""
        if not span.numel:
            return untouched or ALL_TOUCHED
        exchange, encoder = self._exchange, self._encoder
        (scale,) = exchange.common_scales(encoder, vector, [span])
        mine = self.last_payload = fresh(encoder.encode(vector, span, scale), vector)
        exchange.begin()
        exchange.untouched = untouched or ALL_TOUCHED
        for index in exchange.others:
            exchange.send(index, mine)
        codec = codec_for_span(encoder.codec, span, self._w.flat.slots)
        add_decoded(self._w, codec, exchange.in_order(mine), vector[span.start : span.stop], self._spare)
        return exchange.untouched

    def state(self) -> Saved:
        """What the codec has not sent yet."""
        return under("memory", self._encoder.state())

    def restore(self, saved: Sequence[Saved]) -> None:
        """Take over what this worker's predecessors had not sent yet."""
        self._encoder.inherit(unsent(self._exchange.inherited(saved)))
