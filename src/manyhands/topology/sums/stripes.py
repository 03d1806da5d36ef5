"""Stripes: each rank owns a stripe, adds what all others send for it, and tells the sum; both ways encoded.

Who encodes what, P = 3, a span cut into stripes 0 1 2:

                  reduce-scatter                      all-gather
    rank 0     x0[1] → 1   x0[2] → 2       s[0] → 1, 2       s[0] = x0[0] + x1[0] + x2[0]
    rank 1     x1[2] → 2   x1[0] → 0       s[1] → 2, 0
    rank 2     x2[0] → 0   x2[1] → 1       s[2] → 0, 1

    worker k    for every stripe j:  q = encode(x_k[j])                          remainder E_k
    owner j     s = decoded q's in the order of ranks;  u = encode(s)            remainder S_j
    all         out[j] = decode(u), the owner too

    sum of all out + S + sum over k of E_k = sum of all x_k       if the codec remembers what it loses

    2 (P - 1) / P |payload of the span| bytes sent per rank: as few as a ring, however many ranks

Where all have one scale they agree on those of all stripes at once, before the first half: (P - 1) |scales| more.

Reference: F. Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed
Training of Speech DNNs", 2014, https://www.isca-archive.org/interspeech_2014/seide14_interspeech.html.

Where we differ: there a stripe is some columns of every matrix; here it is a stretch of the span, cut at multiples of
64 numbers. When the number of workers changes, what owners had not told yet is handed to workers, who send it: an
owner's stripes are others then, but nothing is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from manyhands.core.flat import Span
from manyhands.core.protocols import Codec, Saved
from manyhands.core.saving import section, under
from manyhands.core.sending import Sender, over
from manyhands.core.worker import Worker
from manyhands.topology.collectives.group import Outbox
from manyhands.topology.sums.exchange import Exchange, add_decoded, fresh

GRAIN = 64
"""Numbers that stay together: codecs that pack bits waste none at the end of a stripe."""


def cut(span: Span, P: int, grain: int = GRAIN) -> list[Span]:
    """P stripes of about the same length, some of them empty if the span is short."""
    part, start, stop = span
    grains = -(-span.numel // grain)
    ends = [min(stop, start + grain * (grains * j // P)) for j in range(P + 1)]
    return [Span(part, low, high) for low, high in pairwise(ends)]


class AllGather:
    """The second half: each rank tells its own stripe, and everyone, the owner too, has what was decoded."""

    def __init__(self, w: Worker, codec: Codec, ranks: Sequence[int] | None, name: str) -> None:
        self._w = w
        self._exchange = Exchange(w, ranks, name)
        self.sender = Sender(w, codec, key=1)

    @torch.no_grad()
    def all_gather(self, vector: Tensor, stripes: Sequence[Span]) -> None:
        """Replace everyone's stripes by what their owners have there."""
        own = stripes[self._exchange.place]
        mine = fresh(self.sender.encode(vector, own), vector) if own.numel else ()
        self._exchange.begin()
        for place in self._exchange.others if own.numel else ():
            self._exchange.send(place, mine)
        silent = [place for place, stripe in enumerate(stripes) if not stripe.numel]
        for place, payload in self._exchange.in_order(mine, silent):
            out = vector[stripes[place].start : stripes[place].stop]
            self._w.move(out.nbytes)
            if not out.is_meta:
                over(self.sender.codec, stripes[place], self._w.flat.places).decode(payload, out)


class Stripes:
    """A sum by an encoded reduce-scatter and an encoded all-gather.

    Args:
        w: this worker.
        codec: what vectors look like on the wire, both ways.
        ranks: who sums; all workers if not given.
    """

    def __init__(self, w: Worker, codec: Codec, ranks: Sequence[int] | None = None) -> None:
        self._w = w
        self._exchange = Exchange(w, ranks, "reduce-scatter")
        self._sender = Sender(w, codec)
        self._told = AllGather(w, codec, ranks, "all-gather")
        self._spare = Outbox()

    def add_up(self, vector: Tensor, span: Span) -> None:
        """Both halves."""
        self.reduce_scatter(vector, span)
        self.all_gather(vector, span)

    def stripes(self, span: Span) -> list[Span]:
        """Who owns which stretch of a span."""
        return cut(span, self._exchange.size)

    @torch.no_grad()
    def reduce_scatter(self, vector: Tensor, span: Span) -> Span:
        """Replace the own stripe, which is returned, by the sum of what all send for it; the rest stays as it is."""
        stripes = self.stripes(span)
        some = [stripe for stripe in stripes if stripe.numel]
        scales = dict(zip(some, self._exchange.agree(self._sender, vector, some), strict=True))
        self._exchange.begin()
        for stripe, place in ((stripes[place], place) for place in self._exchange.others):
            if stripe.numel:
                self._exchange.send(place, fresh(self._sender.encode(vector, stripe, scales[stripe]), vector))
        own = stripes[self._exchange.place]
        if own.numel:
            mine = fresh(self._sender.encode(vector, own, scales[own]), vector)
            codec = over(self._sender.codec, own, self._w.flat.places)
            add_decoded(self._w, codec, self._exchange.in_order(mine), vector[own.start : own.stop], self._spare)
        return own

    def all_gather(self, vector: Tensor, span: Span) -> None:
        """Replace every stripe by what its owner tells."""
        self._told.all_gather(vector, self.stripes(span))

    def state(self) -> Saved:
        """What was not sent yet, as a worker and as an owner."""
        return under("memory", self._sender.state()) | under("owner", self._told.sender.state())

    def restore(self, saved: Sequence[Saved]) -> None:
        """Send what was not sent yet."""
        hand_over(self._exchange, saved, self._sender, self._told.sender)


def hand_over(exchange: Exchange, saved: Sequence[Saved], sender: Sender, owner: Sender) -> None:
    """What workers and owners remembered; of owners it goes to workers if stripes are not what they were."""
    heir = owner if len(saved) == exchange.size else sender
    for one in exchange.inherited(saved):
        sender.inherit(section(one, "memory"))
        heir.inherit(section(one, "owner"))
