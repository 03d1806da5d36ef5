"""Relay: an inner node of a tree of servers. A group of workers comes to the shards as one.

    keeper 0   keeper 1   ...         they keep the shards; only they update
       |  |       |  |
       |  +-------|--+------+         one message per group and shard
       +----------+         |
     relay                relay       an activity of the first worker of each group
     |   |                |   |
    w0   w1              w2   w3      children

child                              relay                                  keeper (messages.py)
  PUSH (version seen)  ---------->  held <- held + g
                                    PUSH (oldest version, terms) ------->  a part of an update, or a whole one
  ASK  -------------------------->  ASK -------------------------------->  admitted? parked?
  <---- WEIGHTS, to all who asked   <------------------------------------  WEIGHTS (version, lag)
  DONE, REST, JOIN -------------->  the same, once the last, or the first, of the group has said so

What goes up is the sum of the group's gradients, how many they are, of how many mini-batches, and the oldest version
that one of them was computed at: staleness is that of the original read. Sums go up raw: what children have encoded is
decoded first, and a second encoding would either lose what nobody remembers, or need a memory that every checkpoint has
to carry. FINAL, SAVE and RESTORE, for which all others rest, go straight from the lead to the keepers.

When a sum goes up: where an update is made of the gradients of several workers, or clocks are bounded, as soon as all
of the group have brought theirs. So inside a group all go in step, and outside it counts as one worker. Where nobody
waits, at once; but then the keeper is asked for the weights, whether somebody wants them or not, and until it has
answered nothing else is sent: what comes in meanwhile becomes the next sum. So one sum at most is in the air and one
per child is held, however fast they are.

An answer goes to all who have asked by then, except to those who have brought a gradient that was not yet in the air:
whoever reads has its own gradients in the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import torch
from torch import Tensor

from manyhands.core.errors import PeerLost
from manyhands.core.flat import Span
from manyhands.core.protocols import Codec, Consistency, Message, Meta, Tag, recv
from manyhands.core.sending import over
from manyhands.core.worker import Worker
from manyhands.topology.servers.messages import (
    ASK,
    DONE,
    JOIN,
    PUSH,
    READY,
    REST,
    WEIGHTS,
    MessageLane,
    Pushed,
    lengths_of,
)

INNER = {
    tag: Tag(f"group-{tag.name}", credit=64, carries=tag.carries)
    for tag in (ASK, PUSH, WEIGHTS, DONE, REST, JOIN, READY)
}
"""The same words between a child and its relay: a rank may be child, relay and keeper, and must tell them apart. A
child has one relay for all shards, and speaks to it of all of them at once."""
FROM_CHILDREN = [INNER[tag] for tag in (PUSH, ASK, DONE, REST, JOIN)]


def _weights_of(keeper: int) -> Tag:
    """A lane for every shard: a child reads them in an order of its own, and no answer may stand in another's way."""
    return Tag(f"{INNER[WEIGHTS].name}:{keeper}", carries=WEIGHTS.carries)


@dataclass(frozen=True)
class Tree:
    """Workers in groups of neighbours, as even as can be.

    Args:
        groups: how many.
        what: how a sum of gradients looks on the wire; a codec without memory.
    """

    groups: int
    what: Codec

    def divide(self, workers: Sequence[int]) -> list[Sequence[int]]:
        """The workers of every group; the first of each is its relay."""
        base, larger = divmod(len(workers), self.groups)
        starts = [number * base + min(number, larger) for number in range(self.groups + 1)]
        return [workers[start:stop] for start, stop in pairwise(starts)]

    def relays(self, workers: Sequence[int]) -> list[int]:
        """The first worker of every group."""
        return [group[0] for group in self.divide(workers)]


class RelayedLane(MessageLane):
    """A worker's lane to a shard by way of its relay."""

    def __init__(
        self, w: Worker, keeper: int, spans: list[Span], first: MessageLane | None = None, *, relay: int
    ) -> None:
        super().__init__(w, keeper, spans, first)
        self._relay = relay
        self._weights = _weights_of(keeper)

    def _say(self, tag: Tag, meta: Meta = (), tensors: Sequence[Tensor] = ()) -> None:
        self._post.send(self._relay, INNER[tag], (self._keeper, *meta), tensors)

    def _hear(self, tag: Tag) -> Message:
        return recv(self._post, self._weights if tag == WEIGHTS else INNER[tag], frm=self._relay)

    def lose(self, loss: PeerLost) -> None:
        """Without keeper or relay nothing goes on."""
        if loss.rank in (self._keeper, self._relay):
            raise loss


@dataclass
class Held:
    """The sum of some gradients, and what must be known of it."""

    gradients: list[Tensor]
    seen: int
    untouched: frozenset[int]
    batches: int
    terms: int

    @torch.no_grad()
    def add(self, other: Held) -> None:
        """Take in another one."""
        for x, y in zip(self.gradients, other.gradients, strict=True):
            x.add_(y)
        self.seen = min(self.seen, other.seen)
        self.untouched &= other.untouched
        self.batches += other.batches
        self.terms += other.terms


class Branch:
    """What a relay has to do with one shard; `waits`: whether its sums are of everyone in the group."""

    def __init__(
        self, w: Worker, keeper: int, spans: list[Span], children: Sequence[int], codec: Codec, what: Codec, waits: bool
    ) -> None:
        self._w = w
        self._t = w.transport
        self._keeper = keeper
        self._like = [w.flat.weights(span) for span in spans]
        self._nbytes = sum(x.nbytes for x in self._like)
        self._codecs, self._what = [over(codec, span, w.flat.places) for span in spans], what
        self._waits = waits
        self._weights = _weights_of(keeper)
        self._at_work = set(children)
        self._resting: set[int] = set()
        self._held: dict[int, Held] = {}
        self._asking: dict[int, int] = {}
        """Who waits for weights, and for which version at least."""
        self._under_way = False
        """Whether the keeper has been asked and has not answered."""
        self._brought: set[int] = set()
        """Whose gradients went up last."""
        self._refused: set[int] = set()
        """Whose gradients were not accepted, and who has not heard of it."""
        self._is_there = True
        """Whether the keeper thinks that this group is at work."""

    @property
    def is_over(self) -> bool:
        """Whether nobody will come again."""
        return not self._is_there and not self._resting

    def push(self, child: int, pushed: Pushed, message: Message) -> None:
        """Take in a gradient; the message goes back at once."""
        self._w.move(self._nbytes)
        gradients = [torch.empty_like(x) for x in self._like]
        for codec, tensors, out in zip(self._codecs, pushed.regroup(message.tensors), gradients, strict=True):
            if not out.is_meta:
                codec.decode(tensors, out)
        message.release()
        one = Held(gradients, pushed.seen, frozenset(pushed.untouched), pushed.batches, pushed.terms)
        if child in self._held:
            self._held[child].add(one)
        else:
            self._held[child] = one

    def ask(self, child: int, wanted: int) -> None:
        """A child wants to read."""
        self._asking[child] = wanted

    def leave(self, child: int, *, rests: bool = False) -> None:
        """A child will not come again, or not before it joins; what it has brought stays."""
        self._at_work.discard(child)
        self._resting.discard(child)
        self._asking.pop(child, None)
        if rests:
            self._resting.add(child)

    def join(self, child: int) -> None:
        """A child is back; the first of them brings the group back."""
        if not self._is_there:
            self._t.send(self._keeper, JOIN)
            recv(self._t, READY, frm=self._keeper)
            self._is_there = True
        self._resting.discard(child)
        self._at_work.add(child)
        self._t.send(child, INNER[READY])

    def answer(self, message: Message) -> None:
        """Weights have come: they go to all who asked, but for those whose own gradients they cannot contain."""
        version, lag, refused = message.meta
        self._w.move(self._nbytes)
        weights = message.keep()
        self._under_way = False
        if refused:
            self._refused |= self._brought
        for child in [one for one in sorted(self._asking) if one not in self._held and self._asking[one] <= version]:
            del self._asking[child]
            self._t.send(child, self._weights, (version, lag, int(child in self._refused)), weights)
            self._refused.discard(child)

    def advance(self) -> None:
        """Send up what is due, unless an answer is under way."""
        if self._under_way:
            return
        due = bool(self._held) and (not self._waits or self._at_work <= self._held.keys())
        if due:
            self._pass_on()
        wanted = [self._asking[child] for child in self._asking if child not in self._held]
        if wanted or (due and not self._waits):
            self._t.send(self._keeper, ASK, (max(wanted, default=0),))
            self._under_way = True
        elif self._is_there and not self._at_work:
            self._t.send(self._keeper, REST if self._resting else DONE)
            self._is_there = False

    def _pass_on(self) -> None:
        """One message for all that is held, summed in the order of ranks."""
        total, *others = [self._held[child] for child in sorted(self._held)]
        for other in others:
            total.add(other)
        self._w.move(len(others) * self._nbytes)
        payload = [self._what.encode(g, None) for g in total.gradients]
        untouched = tuple(sorted(total.untouched))
        pushed = Pushed(total.seen, untouched, lengths_of(payload), total.batches, total.terms)
        self._t.send(self._keeper, PUSH, pushed, tuple(chain(*payload)))
        self._brought, self._held = set(self._held), {}


class Relay:
    """The loop of a relay: for its children what a keeper is for workers, for the keepers what a worker is.

    Args:
        w: the rank it is on.
        tree: who belongs together.
        keepers: the ranks that keep `shards`.
        when: when workers agree.
        codec: what a child's push looks like on the wire.
    """

    def __init__(
        self,
        w: Worker,
        tree: Tree,
        keepers: Sequence[int],
        shards: Sequence[list[Span]],
        when: Consistency,
        codec: Codec,
    ) -> None:
        self._t = w.transport
        self._when = when
        (self._children,) = [group for group in tree.divide(w.workers) if group[0] == w.rank]
        self._vital = {*keepers, *tree.relays(w.workers)}
        waits = when.merges or when.bounds_clocks
        self._branches = {
            keeper: Branch(w, keeper, spans, self._children, codec, tree.what, waits)
            for keeper, spans in zip(keepers, shards, strict=True)
        }

    def serve(self) -> None:
        """Pass on what comes until all children are done."""
        while not all(branch.is_over for branch in self._branches.values()):
            try:
                message = recv(self._t, *FROM_CHILDREN, WEIGHTS)
            except PeerLost as loss:
                self._lose(loss)
            else:
                self._handle(message).advance()

    def _handle(self, message: Message) -> Branch:
        tag, child = message.tag, message.frm
        if tag == WEIGHTS:
            branch = self._branches[message.frm]
            branch.answer(message)
            return branch
        keeper, *meta = message.meta
        branch = self._branches[keeper]
        if tag == INNER[PUSH]:
            branch.push(child, Pushed(*meta), message)
        elif tag == INNER[ASK]:
            branch.ask(child, *meta)
        elif tag == INNER[JOIN]:
            branch.join(child)
        else:
            branch.leave(child, rests=tag == INNER[REST])
        return branch

    def _lose(self, loss: PeerLost) -> None:
        """A lost child is left out, if its method can do without."""
        child = loss.rank
        if child in self._vital or (child in self._children and not self._when.tolerates_loss):
            raise loss
        if child in self._children:
            for branch in self._branches.values():
                branch.leave(child)
                branch.advance()
