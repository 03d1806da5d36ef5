"""A shard reached by messages: the loop of the rank that keeps it, and a worker's lane to it.

worker                          keeper
  ASK (at least this version) -->  pull: admitted? parked?
  <-----------------  WEIGHTS (version, lag)
  PUSH (version seen) ---------->  push: apply, free the parked
  DONE  ------------------------>  leave
  LOOK  ------------------------>  answered SEEN (the weights as they are), which changes nothing
  FINAL ------------------------>  answered LAST (the weights) when all are done

Around a checkpoint workers rest: they have left, but will be back.

  REST  ------------------------>  leave
  FINAL, SAVE ------------------>  answered when all rest: LAST, STATE
  JOIN  ------------------------>  back at the slowest clock, answered READY
  RESTORE ---------------------->  remember what was saved, answered READY

If one shard decides for all, its keeper tells the others whose gradients made an update, and they follow:

  first keeper  ORDER (workers) ----------------->  other keepers

Workers then ask the first before the others, and want from those at least the version they have seen there.

In a tree of servers it is not the workers that come to a keeper, but the relays of their groups: see relay.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import NamedTuple

import torch
from torch import Tensor

from manyhands.core.errors import PeerLost
from manyhands.core.flat import Span
from manyhands.core.protocols import Message, Meta, Post, Saved, Tag, recv
from manyhands.core.saving import Piece
from manyhands.core.worker import Worker
from manyhands.topology.servers.inbox import Payload
from manyhands.topology.servers.shard import Shard

ASK, DONE, FINAL = Tag("ask", carries="nothing"), Tag("done", carries="nothing"), Tag("final", carries="nothing")
PUSH, WEIGHTS = Tag("push", carries="vectors"), Tag("weights", carries="floats")
EXCHANGE, MOVED = Tag("exchange", carries="vectors"), Tag("moved", carries="vectors")
REST, JOIN, READY = Tag("rest", carries="nothing"), Tag("join", carries="nothing"), Tag("ready", carries="nothing")
SAVE, STATE, RESTORE = Tag("save", carries="nothing"), Tag("state"), Tag("restore")
LAST = Tag("last-weights", carries="floats")
LOOK, SEEN = Tag("look", carries="nothing"), Tag("seen-weights", carries="floats")
ORDER = Tag("next-update", credit=64, carries="nothing")

AT_WORK = PUSH, ASK, EXCHANGE, DONE, REST, JOIN, RESTORE, ORDER, LOOK
AT_REST = FINAL, SAVE
"""What a keeper answers at any time, and what it answers only while everyone rests."""


class Pushed(NamedTuple):
    """What comes with a pushed gradient: of a sum of several the oldest version, and how many they are."""

    seen: int
    untouched: Sequence[int]
    lengths: Sequence[int]
    """For every span of the shard how many tensors its payload has."""
    batches: int
    terms: int = 1

    def regroup(self, tensors: Sequence[Tensor]) -> Payload:
        """A message's tensors, as one payload per span."""
        return regroup(tensors, self.lengths)


def lengths_of(payload: Payload) -> tuple[int, ...]:
    """For every span how many tensors its payload has: what `regroup` must know."""
    return tuple(len(tensors) for tensors in payload)


def regroup(tensors: Sequence[Tensor], lengths: Sequence[int]) -> Payload:
    """A message's tensors, as one payload per span."""
    stops = list(accumulate(lengths))
    return [tensors[stop - length : stop] for stop, length in zip(stops, lengths, strict=True)]


class Keeper:
    """The loop of a rank that keeps a shard; `keepers` are all such ranks: none of them can be spared.

    Nor can `relays`, if there are any: then they come here, and not the workers. With a `post` of its own it hears of
    workers, and answers them, only through that.
    """

    def __init__(
        self,
        w: Worker,
        shard: Shard,
        keepers: Sequence[int],
        relays: Sequence[int] = (),
        post: Post | None = None,
    ) -> None:
        self._w = w
        self._t = w.transport
        self._post: Post = post or w.transport
        self._shard = shard
        self._keepers = keepers
        self._vital = {*keepers, *relays}
        self._clients = relays or w.seats
        self._number = {rank: i for i, rank in enumerate(self._clients)}
        self._resting: set[int] = set()
        self._lends = post is None and not shard.when.tolerates_loss and not shard.seen
        """Whether readers get the weights themselves: if no worker can be spared, the next update waits for one more
        gradient of each of them, which comes after what it has read."""
        if shard.when.scope == "job":
            if w.rank == keepers[0]:
                shard.announce = self._order
            else:
                shard.orders = deque()

    def serve(self) -> None:
        """Answer workers until all are done, then the one who reads the outcome."""
        self.serve_workers()
        self.serve_reader()

    def serve_workers(self) -> None:
        """Answer until all are done."""
        while (alive := self._shard.ledger.alive) or self._resting:
            try:
                message = recv(self._post, *AT_WORK, *(() if alive else AT_REST))
            except PeerLost as loss:
                self._lose(loss)
            else:
                self._handle(message)

    def _order(self, workers: Sequence[int]) -> None:
        for rank in self._keepers[1:]:
            self._t.send(rank, ORDER, tuple(workers))

    def _catch_up(self, version: int) -> None:
        """Follow the shard that decides until this version, which somebody has seen there."""
        while self._shard.ledger.version < version:
            try:
                self._handle(recv(self._post, ORDER))
            except PeerLost as loss:
                self._lose(loss)

    def _lose(self, loss: PeerLost) -> None:
        if loss.rank in self._vital:
            raise loss
        if loss.rank in self._number:
            self._resting.discard(self._number[loss.rank])
            self._answer(self._shard.lose(self._number[loss.rank], loss))

    def serve_reader(self) -> None:
        """The lowest worker still there reads; if it goes without having read, the next one may."""
        me = [self._w.rank] if self._t.role == "worker" else []
        while workers := [*me, *self._t.peers("worker")]:
            lead = min(workers)
            try:
                message = recv(self._post, FINAL, frm=lead)
            except PeerLost as loss:
                if loss.rank in self._vital:
                    raise
            else:
                self._catch_up(*message.meta)
                self._send_weights(lead, LAST, self._weights())
                return

    def _handle(self, message: Message) -> None:
        shard, tag = self._shard, message.tag
        if tag == ORDER:
            self._answer(shard.follow(message.meta))
            return
        i = self._number[message.frm]
        if tag == PUSH:
            self._take(i, Pushed(*message.meta), message)
        elif tag == ASK:
            if shard.pull(i, *message.meta):
                self._answer([i])
        elif tag == EXCHANGE:
            self._exchange(message)
        elif tag == DONE:
            self._answer(shard.leave(i))
        elif tag == LOOK:
            self._post.send(message.frm, SEEN, tensors=self._weights())
        else:
            self._handle_checkpoint(message, i)

    def _take(self, i: int, pushed: Pushed, message: Message) -> None:
        """A gradient has come in."""
        self._w.move(self._shard.nbytes)
        payload, (seen, untouched, _, batches, terms) = pushed.regroup(message.tensors), pushed
        freed = self._shard.push(i, payload, seen, untouched, message.release, batches=batches, terms=terms)
        self._answer(freed)

    def _exchange(self, message: Message) -> None:
        """A worker has come to where the weights are to be pulled."""
        self._w.move(self._shard.nbytes_of_exchange)
        alpha, *lengths = message.meta
        moves = self._shard.exchange(regroup(message.tensors, lengths), alpha)
        message.release()
        self._post.send(message.frm, MOVED, lengths_of(moves), tuple(chain(*moves)))

    def _handle_checkpoint(self, message: Message, i: int) -> None:
        shard, tag = self._shard, message.tag
        if tag == REST:
            self._resting.add(i)
            self._answer(shard.leave(i))
        elif tag == FINAL:
            self._catch_up(*message.meta)
            self._send_weights(message.frm, LAST, self._weights())
        elif tag == SAVE:
            self._catch_up(*message.meta)
            found = shard.pieces(self._w.flat.places)
            names, starts = tuple(piece.name for piece in found), tuple(piece.start for piece in found)
            meta = shard.ledger.version, names, starts
            self._post.send(message.frm, STATE, meta, [piece.values for piece in found])
        else:
            if tag == JOIN:
                self._resting.discard(i)
                shard.ledger.join(i)
            else:
                shard.restore(self._w.flat.places, dict(zip(message.meta, message.tensors, strict=True)))
                message.release()
            self._post.send(message.frm, READY)

    def _answer(self, admitted: list[int]) -> None:
        """One copy for all: nobody changes it, so it is also what they have seen."""
        weights = self._weights() if admitted else []
        for i in admitted:
            self._send_weights(self._clients[i], WEIGHTS, weights)
            if self._shard.seen:
                self._shard.seen[i] = weights

    def _weights(self) -> list[Tensor]:
        """The weights as they are now, and as they stay until they are read."""
        weights = [h.weights for h in self._shard.holdings]
        if self._lends:
            return weights
        self._w.move(self._shard.nbytes)
        return [x if x.is_meta else x.clone() for x in weights]

    def _send_weights(self, rank: int, tag: Tag, weights: list[Tensor]) -> None:
        ledger, i = self._shard.ledger, self._number[rank]
        self._post.send(rank, tag, (ledger.version, ledger.lag[i], ledger.refused[i]), weights)
        ledger.refused[i] = 0


class MessageLane:
    """A worker's lane to a shard kept by another rank, or by another activity of its own.

    `first` is the lane to the shard that decides, if this one follows: it must be read before. With a `post` of its own
    it talks to the keeper only through that.
    """

    def __init__(
        self, w: Worker, keeper: int, spans: list[Span], first: MessageLane | None = None, post: Post | None = None
    ) -> None:
        self.spans = spans
        self.lag = 0
        self.refused = False
        self._first = first
        self._post: Post = post or w.transport
        self._places = w.flat.places
        self._keeper = keeper
        self._version = 0

    def _say(self, tag: Tag, meta: Meta = (), tensors: Sequence[Tensor] = ()) -> None:
        """Tell whoever this lane leads to."""
        self._post.send(self._keeper, tag, meta, tensors)

    def _hear(self, tag: Tag) -> Message:
        """What it answers."""
        return recv(self._post, tag, frm=self._keeper)

    def ask(self) -> None:
        self._say(ASK, self._wanted)

    @property
    def _wanted(self) -> Meta:
        """The version that this lane's shard must have come to."""
        return (0 if self._first is None else self._first._version,)

    def pull(self, into: Sequence[Tensor]) -> None:
        self._read(self._hear(WEIGHTS), into)

    def _read(self, message: Message, into: Sequence[Tensor]) -> None:
        _copy(message.tensors, into)
        message.release()
        self._version, self.lag, refused = message.meta
        self.refused = bool(refused)

    def push(self, payload: Payload, untouched: Sequence[int], into: Sequence[Tensor] = (), batches: int = 1) -> None:
        seen = (self._first or self)._version  # who follows may have been read later, but judges as the first does
        pushed = Pushed(seen, tuple(untouched), lengths_of(payload), batches)
        self._say(PUSH, pushed, tuple(chain(*payload)))

    def exchange(self, payload: Payload, alpha: float) -> Payload:
        self._post.send(self._keeper, EXCHANGE, (alpha, *lengths_of(payload)), tuple(chain(*payload)))
        message = recv(self._post, MOVED, frm=self._keeper)
        return regroup(message.keep(), message.meta)

    def look(self, into: Sequence[Tensor]) -> None:
        self._say(LOOK)
        message = self._hear(SEEN)
        _copy(message.tensors, into)
        message.release()

    def done(self) -> None:
        self._say(DONE)

    def lose(self, loss: PeerLost) -> None:
        """Its keeper is told as we are; without that nothing goes on."""
        if loss.rank == self._keeper:
            raise loss

    def rest(self) -> None:
        self._say(REST)

    def join(self) -> None:
        self._say(JOIN)
        self._hear(READY)

    def state(self) -> list[Piece]:
        self._post.send(self._keeper, SAVE, self._wanted)
        message = recv(self._post, STATE, frm=self._keeper)
        self._version, names, starts = message.meta
        return [Piece(*one) for one in zip(names, starts, message.keep(), strict=True)]

    def restore(self, saved: Saved) -> None:
        mine = {place.name for place in self._places if any(_overlap(place.span, span) for span in self.spans)} | {""}
        wanted = {name: value for name, value in saved.items() if name.rpartition("/")[0] in mine}
        self._post.send(self._keeper, RESTORE, tuple(wanted), tuple(wanted.values()))
        recv(self._post, READY, frm=self._keeper)

    def final(self, into: Sequence[Tensor]) -> None:
        self._post.send(self._keeper, FINAL, self._wanted)
        self._read(recv(self._post, LAST, frm=self._keeper), into)


@torch.no_grad()
def _copy(tensors: Sequence[Tensor], into: Sequence[Tensor]) -> None:
    for x, y in zip(tensors, into, strict=True):
        if not y.is_meta:
            y.copy_(x)


def _overlap(one: Span, other: Span) -> bool:
    """Whether two spans have something in common."""
    return one.part == other.part and one.start < other.stop and other.start < one.stop
