"""Stripes: each rank owns a stripe, adds what all others send for it, and sends the sum to all; both ways encoded.

What is encoded, P = 3, a span cut into stripes 0 1 2:

                  reduce-scatter                      all-gather
    rank 0     x0[1] → 1   x0[2] → 2       s[0] → 1, 2       s[0] = x0[0] + x1[0] + x2[0]
    rank 1     x1[2] → 2   x1[0] → 0       s[1] → 2, 0
    rank 2     x2[0] → 0   x2[1] → 1       s[2] → 0, 1

    worker k    for every stripe j:  q = encode(x_k[j])                          remainder E_k
    owner j     s = decoded q's in the order of ranks;  u = encode(s)            remainder S_j
    all         out[j] = decode(u), the owner too

    sum of all out + S + sum over k of E_k = sum of all x_k       if the codec remembers what it loses

    2 (P - 1) / P |payload of the span| bytes sent per rank: as few as a ring, however many ranks

Where all have a common scale, those of all stripes are max-reduced at once, before the first half.

Reference: F. Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed
Training of Speech DNNs", 2014, https://www.isca-archive.org/interspeech_2014/seide14_interspeech.html.

Where we differ: there a stripe is some columns of every matrix; here it is a part of the span, cut at multiples of 64
numbers. When the number of workers changes, the remainders of owners are given to workers, which send them: the stripes
of an owner are others then, but nothing is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from manyhands.collectives.compressed.exchange import ALL_TOUCHED, PayloadExchange, Untouched, add_decoded, fresh
from manyhands.collectives.group import Outbox
from manyhands.core.codec import Codec
from manyhands.core.encoder import Encoder, codec_for_span
from manyhands.core.flat import Span
from manyhands.core.state import section, under
from manyhands.core.strategy import Saved
from manyhands.core.worker import Worker

GRAIN = 64
"""Stripes begin at multiples of this: codecs that pack bits waste none at the end of a stripe."""


def cut(span: Span, P: int, grain: int = GRAIN) -> list[Span]:
    """P stripes of about the same length, some of them empty if the span is short."""
    group, start, stop = span
    grains = -(-span.numel // grain)
    ends = [min(stop, start + grain * (grains * j // P)) for j in range(P + 1)]
    return [Span(group, low, high) for low, high in pairwise(ends)]


class EncodedAllGather:
    """The second half: each rank sends its stripe encoded, and all ranks, the owner too, decode the same payload."""

    def __init__(self, w: Worker, codec: Codec, ranks: Sequence[int] | None, name: str) -> None:
        self._w = w
        self._exchange = PayloadExchange(w, ranks, name)
        self.encoder = Encoder(w, codec, key=1)

    @torch.no_grad()
    def all_gather(self, vector: Tensor, stripes: Sequence[Span], untouched: Untouched | None = None) -> Untouched:
        """Replace all stripes by what their owners have there."""
        exchange = self._exchange
        own = stripes[exchange.index_in_group]
        mine = fresh(self.encoder.encode(vector, own), vector) if own.numel else ()
        exchange.begin()
        exchange.untouched = untouched or ALL_TOUCHED
        for index in exchange.others if own.numel else ():
            exchange.send(index, mine)
        silent = [index for index, stripe in enumerate(stripes) if not stripe.numel]
        for index, payload in exchange.in_order(mine, silent):
            codec = codec_for_span(self.encoder.codec, stripes[index], self._w.flat.slots)
            self._w.ops.decode(codec, payload, vector[stripes[index].start : stripes[index].stop])
        return exchange.untouched


class Stripes:
    """A sum by an encoded reduce-scatter and an encoded all-gather.

    Args:
        w: this worker.
        codec: how vectors are encoded, both ways.
        ranks: the ranks that sum; all workers if not given.
    """

    def __init__(self, w: Worker, codec: Codec, ranks: Sequence[int] | None = None) -> None:
        self._w = w
        self._exchange = PayloadExchange(w, ranks, "reduce-scatter")
        self._encoder = Encoder(w, codec)
        self._second = EncodedAllGather(w, codec, ranks, "all-gather")
        self._spare = Outbox()

    def all_reduce(self, vector: Tensor, span: Span, untouched: Untouched | None = None) -> Untouched:
        """Both halves; each owner has received the sets of all ranks after the first."""
        self._exchange.untouched = untouched or ALL_TOUCHED
        self.reduce_scatter(vector, span)
        return self._second.all_gather(vector, self.stripes(span), self._exchange.untouched)

    def stripes(self, span: Span) -> list[Span]:
        """The stripe of a span that each index owns."""
        return cut(span, self._exchange.size)

    @torch.no_grad()
    def reduce_scatter(self, vector: Tensor, span: Span) -> Span:
        """Replace the own stripe, which is returned, by the sum over all ranks; the rest is not changed."""
        exchange, encoder, stripes = self._exchange, self._encoder, self.stripes(span)
        some = [stripe for stripe in stripes if stripe.numel]
        scales = dict(zip(some, exchange.common_scales(encoder, vector, some), strict=True))
        exchange.begin()
        for stripe, index in ((stripes[index], index) for index in exchange.others):
            if stripe.numel:
                exchange.send(index, fresh(encoder.encode(vector, stripe, scales[stripe]), vector))
        own = stripes[exchange.index_in_group]
        if own.numel:
            mine = fresh(encoder.encode(vector, own, scales[own]), vector)
            codec = codec_for_span(encoder.codec, own, self._w.flat.slots)
            add_decoded(self._w, codec, exchange.in_order(mine), vector[own.start : own.stop], self._spare)
        return own

    def all_gather(self, vector: Tensor, span: Span) -> None:
        """Replace every stripe by the one of its owner."""
        self._second.all_gather(vector, self.stripes(span))

    def state(self) -> Saved:
        """What was not sent yet, as a worker and as an owner."""
        return under("memory", self._encoder.state()) | under("owner", self._second.encoder.state())

    def restore(self, saved: Sequence[Saved]) -> None:
        """Take over what was not sent yet."""
        inherit(self._exchange, saved, self._encoder, self._second.encoder)


def inherit(exchange: PayloadExchange, saved: Sequence[Saved], encoder: Encoder, owner: Encoder) -> None:
    """Take over the remainders of workers and owners; workers get those of owners if the stripes have changed."""
    heir, states = owner if len(saved) == exchange.size else encoder, exchange.inherited(saved)
    encoder.inherit([section(state, "memory") for state in states])
    heir.inherit([section(state, "owner") for state in states])
