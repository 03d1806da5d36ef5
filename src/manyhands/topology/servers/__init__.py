"""Parameter servers: who keeps the weights, and how a worker reaches them.

server ranks          shard k is kept by the k-th server, and by the next one too if there are to be two copies
workers on one host   shards lie in the host's shared memory, one per worker (if the rule can be shared)
otherwise             shard k is kept by an activity of the k-th worker

With a tree workers come in groups, by way of relays (relay.py). Inside a host there is nothing to save by that, so a
tree is always one of messages, as if every worker were a host of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial

from manyhands.core.errors import PeerLost
from manyhands.core.flat import Span
from manyhands.core.holding import Holding, corrects
from manyhands.core.protocols import WAITING, Codec, Consistency, Post, Rule, on_one_host
from manyhands.core.sending import over
from manyhands.core.worker import Worker
from manyhands.topology.servers.inbox import Kept, inbox_of, pending_slots
from manyhands.topology.servers.lane import Lane
from manyhands.topology.servers.ledger import Ledger
from manyhands.topology.servers.messages import Keeper, MessageLane
from manyhands.topology.servers.relay import Relay, RelayedLane, Tree
from manyhands.topology.servers.replicas import Replica, lifelines
from manyhands.topology.servers.shard import Shard
from manyhands.topology.servers.sharding import Sharding, Shards, check_servers, cut
from manyhands.topology.servers.shared import shared_lanes

SMALL = 256 * 1024
"""Bytes of a shard that is not worth cutting further inside a host."""

__all__ = ["Lane", "Sharding", "Tree", "check_servers", "connect", "read_outcome", "serve", "waves"]


def connect(
    w: Worker, how: Sharding, when: Consistency, rule: Rule, codec: Codec, tree: Tree | None = None, copies: int = 1
) -> list[Lane]:
    """This worker's lanes to all shards, beginning at its own rank so that not all start at the same shard."""
    me = w.seats.index(w.rank)
    together = when.scope == "job"
    one_host = not w.servers and on_one_host(w.transport, w.seats)
    if copies == 2:
        lanes: list[Lane] = _double_lanes(w, cut(w.flat, how, len(w.servers), rule))
    elif one_host and tree is None and "owner" not in rule.needs and not w.flat.is_meta:
        shards = cut(w.flat, how, 1 if together else _worth_sharing(w), rule, at_most=True)
        lanes = list(shared_lanes(w, shards, when, rule, codec))
    else:
        lanes = _by_messages(w, how, when, rule, codec, tree)
    start = 0 if together else me % len(lanes)
    return lanes[start:] + lanes[:start]


def _by_messages(
    w: Worker, how: Sharding, when: Consistency, rule: Rule, codec: Codec, tree: Tree | None
) -> list[Lane]:
    """Lanes to shards that ranks keep: servers, or workers beside their own work."""
    shards = cut(w.flat, how, len(w.servers or w.workers), rule, at_most=not w.servers)
    keepers = (w.servers or w.workers)[: len(shards)]
    if w.rank in keepers:
        spans = shards[keepers.index(w.rank)]
        w.transport.spawn(_keeper(w, keepers, spans, when, rule, codec, tree).serve)
    lane: Callable[..., MessageLane] = partial(MessageLane, w)
    if tree is not None:
        relay = next(group[0] for group in tree.divide(w.workers) if w.rank in group)
        lane = partial(RelayedLane, w, relay=relay)
        if w.rank == relay:
            w.transport.spawn(Relay(w, tree, keepers, shards, when, codec).serve)
    first = lane(keepers[0], shards[0])
    after = first if when.scope == "job" else None  # then the first shard decides, and the others follow
    return [first, *(lane(*one, after) for one in zip(keepers[1:], shards[1:], strict=True))]


def _double_lanes(w: Worker, shards: Shards) -> list[Lane]:
    """Lanes to shards that have two keepers each."""
    posts = lifelines(w, len(shards))
    return [MessageLane(w, w.servers[k], spans, post=posts[k]) for k, spans in enumerate(shards)]


def waves(lanes: list[Lane], when: Consistency) -> list[list[Lane]]:
    """Which lanes can be read at once, one wave after the other."""
    return [lanes] if when.scope == "shard" else [lanes[:1], lanes[1:]]


def _worth_sharing(w: Worker) -> int:
    """How many shards in shared memory: one per worker, but a lock should guard more than it costs."""
    nbytes = sum(part.weights.nbytes for part in w.flat.parts)
    return min(len(w.workers), 1 + nbytes // SMALL)


def serve(
    w: Worker, how: Sharding, when: Consistency, rule: Rule, codec: Codec, tree: Tree | None = None, copies: int = 1
) -> None:
    """The main program of a server rank, which needs no more of the model than its shard.

    With two copies it also keeps that of the shard before its own.
    """
    shards = cut(w.flat, how, len(w.servers), rule)
    me = w.servers.index(w.rank)
    keep = partial(_keeper, w, w.servers, when=when, codec=codec, tree=tree)
    if copies == 1:
        keeper = keep(shards[me], rule=rule)
        w.flat.let_go()
        keeper.serve()
        return
    before = (me - 1) % len(shards)
    own, other = Replica(w, me), Replica(w, before)
    primary = keep(shards[me], rule=rule, post=own)
    backup = keep(shards[before], rule=copy.deepcopy(rule), post=other)  # a rule may remember things itself
    w.flat.let_go()
    w.transport.spawn(partial(other.serve, backup))
    own.serve(primary)


def read_outcome(w: Worker, lanes: list[Lane]) -> bool:
    """Read all shards once everyone is done; False if they are gone, read by a rank that was lost since."""
    try:
        for lane in lanes:
            lane.final([w.flat.weights(span) for span in lane.spans])
    except PeerLost as loss:
        if loss.why != "left":
            raise
        return False
    return True


def _keeper(
    w: Worker,
    keepers: Sequence[int],
    spans: list[Span],
    when: Consistency,
    rule: Rule,
    codec: Codec,
    tree: Tree | None,
    post: Post | None = None,
) -> Keeper:
    own = partial(Holding, places=w.flat.places, rule=rule, knows_seen=True)
    weights = [w.flat.weights(span) for span in spans]
    holdings = [own(s, x if x.is_meta else x.clone()) for s, x in zip(spans, weights, strict=True)]
    relays = tree.relays(w.workers) if tree else []
    codec, clients = tree.what if tree else codec, len(relays or w.seats)
    slots = pending_slots(when, clients) + clients  # a shard that follows may have to keep more
    ledger = Ledger(clients, 0, slots, late=() if tree else w.seats[len(w.workers) :])
    seen = [[x.clone() for x in weights] for _ in w.seats] if "seen" in rule.needs else ()
    keeps = when.merges and (any(corrects(one.rule) for one in holdings) or when.admit(WAITING))
    codecs = [over(codec, span, w.flat.places) for span in spans]
    inbox = Kept(codecs, [h.weights for h in holdings]) if keeps else inbox_of(codecs)
    shard = Shard(holdings, when, ledger, inbox, w.batch_size, seen, len(w.workers))
    return Keeper(w, shard, keepers, relays, post)
