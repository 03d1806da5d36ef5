"""Aggregator: an inner node of a tree of servers. To a shard, a group of workers is one client.

   server 0   server 1   ...          they hold the shards; only they update
       |  |       |  |
       |  +-------|--+------+         one message per group and shard
       +----------+         |
   aggregator           aggregator    an activity of the first worker of each group
     |   |                |   |
    w0   w1              w2   w3      children

child                              aggregator                             server (shard_server.py)
  PUSH (version seen)  ---------->  sum <- sum + g
                                    PUSH (oldest version, terms) ------->  a part of an update, or a whole one
  ASK  -------------------------->  ASK -------------------------------->  admitted? parked?
  <---- WEIGHTS, to all that asked  <------------------------------------  WEIGHTS (version, clocks ahead, outcomes)
  DONE, QUIESCE, JOIN ----------->  the same, once the last, or the first, of the group has sent it

An aggregator pushes the sum of the group's gradients, how many they are, of how many mini-batches, and the oldest
version that one of them was computed at: the lag is that of the original read. Sums are sent raw: the gradients of
children are decoded first, and a second encoding would either lose what no memory holds, or need a memory that every
checkpoint has to contain. The lead sends FINAL, SAVE and RESTORE, while all other workers have quiesced, to the servers
directly.

When a sum is pushed: where an update is made of the gradients of several workers, or clocks are bounded, as soon as all
children have pushed. So the workers of a group proceed in lock step, and the group has the clock of one worker. Where
no worker waits, at once; but then the server is asked for the weights, whether a child wants them or not, and nothing
else is pushed before it has answered: gradients that arrive until then make the next sum. So at most one sum is in
flight, and one per child is held, however fast they are.

An answer is sent to all children that have asked by then, except those with a gradient that was not yet pushed: what a
worker reads contains its own gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from manyhands.core.codec import Codec
from manyhands.core.consistency import Consistency
from manyhands.core.encoder import codec_for_span
from manyhands.core.errors import PeerLost
from manyhands.core.flat import Span
from manyhands.core.lag import NO_OUTCOMES, Outcomes
from manyhands.core.port import Message, Meta, Tag, recv
from manyhands.core.vector_ops import VectorOps
from manyhands.core.worker import Worker
from manyhands.servers.remote_shard import RemoteShard
from manyhands.servers.server_setup import AggregationTree
from manyhands.servers.shard_server import (
    ASK,
    DONE,
    JOIN,
    PUSH,
    QUIESCE,
    READY,
    WEIGHTS,
    PushHeader,
    lengths_of,
    regroup,
)

INNER = {
    tag: Tag(f"group-{tag.name}", credit=64, carries=tag.carries)
    for tag in (ASK, PUSH, WEIGHTS, DONE, QUIESCE, JOIN, READY)
}
"""The tags between a child and its aggregator: one rank may be child, aggregator and server, and must distinguish their
messages. A child has one aggregator for all shards, so every message begins with the rank of the shard's server."""
FROM_CHILDREN = [INNER[tag] for tag in (PUSH, ASK, DONE, QUIESCE, JOIN)]


def _weights_of(server: int) -> Tag:
    """A channel for every shard: a child reads shards in an order of its own, and no answer may block another."""
    return Tag(f"{INNER[WEIGHTS].name}:{server}", carries=WEIGHTS.carries)


class AggregatedShard(RemoteShard):
    """A worker's client of a shard that it reaches through the aggregator of its group."""

    def __init__(
        self, w: Worker, server: int, spans: list[Span], first: RemoteShard | None = None, *, aggregator: int
    ) -> None:
        super().__init__(w, server, spans, first)
        self._aggregator = aggregator
        self._weights = _weights_of(server)

    def _send(self, tag: Tag, meta: Meta = (), tensors: Sequence[Tensor] = ()) -> None:
        self._endpoint.send(self._aggregator, INNER[tag], (self._server, *meta), tensors)

    def _recv(self, tag: Tag) -> Message:
        return recv(self._endpoint, self._weights if tag == WEIGHTS else INNER[tag], frm=self._aggregator)

    def lose(self, loss: PeerLost) -> None:
        """Without the server or the aggregator the run cannot continue."""
        if loss.rank in (self._server, self._aggregator):
            raise loss


@dataclass
class GradientSum:
    """The sum of some gradients, with the numbers that are pushed with it."""

    gradients: list[Tensor]
    seen: int
    untouched: frozenset[int]
    batches: int
    terms: int
    options: tuple[float, ...]

    @torch.no_grad()
    def add(self, ops: VectorOps, other: GradientSum) -> None:
        """Add the gradients and the numbers of another sum."""
        for x, y in zip(self.gradients, other.gradients, strict=True):
            ops.add(x, y)
        self.seen = min(self.seen, other.seen)
        self.untouched &= other.untouched
        self.batches += other.batches
        self.terms += other.terms


class AggregatorUplink:
    """An aggregator's state for one shard; `waits`: whether its sums contain a gradient of every child."""

    def __init__(
        self, w: Worker, server: int, spans: list[Span], children: Sequence[int], codec: Codec, what: Codec, waits: bool
    ) -> None:
        self._w = w
        self._t = w.transport
        self._server = server
        self._like = [w.flat.weights(span) for span in spans]
        self._codecs, self._what = [codec_for_span(codec, span, w.flat.slots) for span in spans], what
        self._waits = waits
        self._weights = _weights_of(server)
        self._at_work = set(children)
        self._quiesced: set[int] = set()
        self._held: dict[int, GradientSum] = {}
        """For each child the sum of its gradients that were not pushed yet."""
        self._asking: dict[int, int] = {}
        """The children that wait for weights, and the version that each needs at least."""
        self._in_flight = False
        """Whether the server has been asked and has not answered."""
        self._pushed: set[int] = set()
        """The children whose gradients are in the sum that was pushed last."""
        self._outcomes: dict[int, Outcomes] = {}
        """What became of the sums that contain a child's gradients, since it was sent an answer."""
        self._joined = True
        """Whether the group counts as a client of the shard."""

    @property
    def is_over(self) -> bool:
        """Whether all children have finished."""
        return not self._joined and not self._quiesced

    def push(self, child: int, header: PushHeader, message: Message) -> None:
        """Add a gradient to what is held of its child; the message is released at once."""
        payload, ops = regroup(message.tensors, header.lengths), self._w.ops
        parts = zip(self._codecs, payload, self._like, strict=True)
        gradients = [ops.decode(codec, tensors, torch.empty_like(x)) for codec, tensors, x in parts]
        message.release()
        untouched = frozenset(header.untouched)
        one = GradientSum(gradients, header.seen, untouched, header.batches, header.terms, header.options)
        if child in self._held:
            self._held[child].add(ops, one)
        else:
            self._held[child] = one

    def ask(self, child: int, wanted: int) -> None:
        """A child wants to read this version or a later one."""
        self._asking[child] = wanted

    def leave(self, child: int, *, quiesces: bool = False) -> None:
        """A child has finished, is lost, or quiesces; its gradients remain in the sum."""
        self._at_work.discard(child)
        self._quiesced.discard(child)
        self._asking.pop(child, None)
        if quiesces:
            self._quiesced.add(child)

    def join(self, child: int) -> None:
        """A child joins; the first one joins the group to the shard."""
        if not self._joined:
            self._t.send(self._server, JOIN)
            recv(self._t, READY, frm=self._server)
            self._joined = True
        self._quiesced.discard(child)
        self._at_work.add(child)
        self._t.send(child, INNER[READY])

    def answer(self, message: Message) -> None:
        """Send weights to the children that asked, except those whose own gradients they cannot contain."""
        version, ahead, *numbers = message.meta
        weights = self._w.ops.keep(message)
        self._in_flight = False
        for child in self._pushed:
            self._outcomes[child] = self._outcomes.get(child, NO_OUTCOMES).plus(Outcomes(*numbers))
        for child in [one for one in sorted(self._asking) if one not in self._held and self._asking[one] <= version]:
            del self._asking[child]
            outcomes = self._outcomes.pop(child, NO_OUTCOMES)
            self._t.send(child, self._weights, (version, ahead, *outcomes), weights)

    def advance(self) -> None:
        """Push, ask or leave if it is time, unless an answer is outstanding."""
        if self._in_flight:
            return
        due = bool(self._held) and (not self._waits or self._at_work <= self._held.keys())
        if due:
            self._push_sum()
        wanted = [self._asking[child] for child in self._asking if child not in self._held]
        if wanted or (due and not self._waits):
            self._t.send(self._server, ASK, (max(wanted, default=0),))
            self._in_flight = True
        elif self._joined and not self._at_work:
            self._t.send(self._server, QUIESCE if self._quiesced else DONE)
            self._joined = False

    def _push_sum(self) -> None:
        """One message for all held gradients, summed in the order of ranks."""
        total, *others = [self._held[child] for child in sorted(self._held)]
        for other in others:
            total.add(self._w.ops, other)
        payload = [self._what.encode(g, None) for g in total.gradients]
        untouched = tuple(sorted(total.untouched))
        header = PushHeader(total.seen, untouched, lengths_of(payload), total.batches, total.terms, total.options)
        self._t.send(self._server, PUSH, header, tuple(chain(*payload)))
        self._pushed, self._held = set(self._held), {}


class Aggregator:
    """The loop of an aggregator: a server to its children, and a client to the servers.

    Args:
        w: the rank it is on.
        tree: which workers form a group.
        server_ranks: the ranks that hold `shards`.
        shards: the spans of every shard.
        when: when workers agree.
        codec: what a child's push is encoded with.
    """

    def __init__(
        self,
        w: Worker,
        tree: AggregationTree,
        server_ranks: Sequence[int],
        shards: Sequence[list[Span]],
        when: Consistency,
        codec: Codec,
    ) -> None:
        self._t = w.transport
        self._when = when
        (self._children,) = [group for group in tree.divide(w.workers) if group[0] == w.rank]
        self._vital = {*server_ranks, *tree.aggregators(w.workers)}
        waits = when.merges or when.bounds_clocks
        self._uplinks = {
            server: AggregatorUplink(w, server, spans, self._children, codec, tree.what, waits)
            for server, spans in zip(server_ranks, shards, strict=True)
        }

    def serve(self) -> None:
        """Handle messages until all children have finished."""
        while not all(uplink.is_over for uplink in self._uplinks.values()):
            try:
                message = recv(self._t, *FROM_CHILDREN, WEIGHTS)
            except PeerLost as loss:
                self._lose(loss)
            else:
                self._handle(message).advance()

    def _handle(self, message: Message) -> AggregatorUplink:
        tag, child = message.tag, message.frm
        if tag == WEIGHTS:
            uplink = self._uplinks[message.frm]
            uplink.answer(message)
            return uplink
        server, *meta = message.meta
        uplink = self._uplinks[server]
        if tag == INNER[PUSH]:
            uplink.push(child, PushHeader(*meta), message)
        elif tag == INNER[ASK]:
            uplink.ask(child, *meta)
        elif tag == INNER[JOIN]:
            uplink.join(child)
        else:
            uplink.leave(child, quiesces=tag == INNER[QUIESCE])
        return uplink

    def _lose(self, loss: PeerLost) -> None:
        """A lost child leaves the group, if the method tolerates a loss."""
        child = loss.rank
        if child in self._vital or (child in self._children and not self._when.tolerates_loss):
            raise loss
        if child in self._children:
            for uplink in self._uplinks.values():
                uplink.leave(child)
                uplink.advance()
