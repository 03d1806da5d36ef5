"""Which rank holds which shard, and the clients of the workers.

server ranks          shard k is held by the k-th server, and by the next one too if there are to be two copies
workers on one host   shards lie in the host's shared memory, at most one per worker (if the rule can be shared)
otherwise             shard k is held by an activity of the k-th worker

With an aggregation tree, groups of workers reach the shards through aggregators (aggregation.py). A tree saves nothing
inside a host, so it always uses messages, as if every worker were a host of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from manyhands.core.consistency import WAITING, Consistency
from manyhands.core.encoder import codec_for_span
from manyhands.core.errors import PeerLost
from manyhands.core.flat import Span
from manyhands.core.port import Endpoint, on_one_host
from manyhands.core.released import release
from manyhands.core.rule import corrects
from manyhands.core.sharding import cut
from manyhands.core.vector_ops import UNCHARGED
from manyhands.core.weight_slice import WeightSlice
from manyhands.core.worker import Worker
from manyhands.servers.aggregation import AggregatedShard, Aggregator
from manyhands.servers.clock_table import ClockTable
from manyhands.servers.pending_gradients import PendingGradients, decode_when_applied, pending_slots
from manyhands.servers.remote_shard import RemoteShard
from manyhands.servers.replication import ReplicatedServer, failover_clients
from manyhands.servers.server_setup import ServerSetup
from manyhands.servers.shard import Shard
from manyhands.servers.shard_client import ShardClient
from manyhands.servers.shard_server import ShardServer
from manyhands.servers.shared_memory_shard import shared_memory_shards

SMALL = 256 * 1024
"""Bytes of a shard that is not worth cutting further inside a host."""


def connect(w: Worker, setup: ServerSetup) -> list[ShardClient]:
    """This worker's clients of all shards, beginning at its own rank so that not all workers begin at one shard."""
    me = w.worker_ranks.index(w.rank)
    job_wide = setup.when.scope == "job"
    one_host = not w.servers and on_one_host(w.transport, w.worker_ranks)
    if setup.copies == 2:
        shards = cut(w.flat, setup.shard, len(w.servers), setup.rule)
        lines = zip(w.servers, shards, failover_clients(w, len(shards)), strict=True)
        clients: list[ShardClient] = [RemoteShard(w, rank, spans, endpoint=line) for rank, spans, line in lines]
    elif one_host and setup.tree is None and "owner" not in setup.rule.needs:
        # one shard per worker, but a lock should guard more than it costs
        nbytes = sum(group.weights.nbytes for group in w.flat.groups)
        count = 1 if job_wide else min(len(w.workers), 1 + nbytes // SMALL)
        clients = list(shared_memory_shards(w, cut(w.flat, setup.shard, count, setup.rule, at_most=True), setup))
    else:
        clients = _remote_shards(w, setup)
    start = 0 if job_wide else me % len(clients)
    return clients[start:] + clients[:start]


def _remote_shards(w: Worker, setup: ServerSetup) -> list[ShardClient]:
    """Clients of shards that servers hold, or workers in an activity of their own, which is started here."""
    tree = setup.tree
    shards = cut(w.flat, setup.shard, len(w.servers or w.workers), setup.rule, at_most=not w.servers)
    server_ranks = (w.servers or w.workers)[: len(shards)]
    if w.rank in server_ranks:
        spans = shards[server_ranks.index(w.rank)]
        w.transport.spawn(_server(w, setup, server_ranks, spans).serve)
    client: Callable[..., RemoteShard] = partial(RemoteShard, w)
    if tree is not None:
        aggregator = next(group[0] for group in tree.divide(w.workers) if w.rank in group)
        client = partial(AggregatedShard, w, aggregator=aggregator)
        if w.rank == aggregator:
            w.transport.spawn(Aggregator(w, tree, server_ranks, shards, setup.when, setup.codec).serve)
    first = client(server_ranks[0], shards[0])
    after = first if setup.when.scope == "job" else None  # then the first shard decides, and the others follow
    return [first, *(client(*one, after) for one in zip(server_ranks[1:], shards[1:], strict=True))]


def waves(clients: list[ShardClient], when: Consistency) -> list[list[ShardClient]]:
    """Which shards can be read at once, one wave after the other."""
    return [clients] if when.scope == "shard" else [clients[:1], clients[1:]]


def read_outcome(w: Worker, clients: list[ShardClient]) -> bool:
    """Read all shards once every worker has finished; False if a rank that was lost since has read them."""
    try:
        for client in clients:
            client.final([w.flat.weights(span) for span in client.spans])
    except PeerLost as loss:
        if loss.why != "left":
            raise
        return False
    return True


def serve(w: Worker, setup: ServerSetup) -> None:
    """The main program of a server rank, which needs no more of the model than its shard.

    With two copies it also holds a copy of the shard before its own.
    """
    shards = cut(w.flat, setup.shard, len(w.servers), setup.rule)
    me = w.servers.index(w.rank)
    if setup.copies == 1:
        server = _server(w, setup, w.servers, shards[me])
        release(w.flat)
        server.serve()
        return
    before = (me - 1) % len(shards)
    own, other = ReplicatedServer(w, me), ReplicatedServer(w, before)
    primary = _server(w, setup, w.servers, shards[me], own)
    apart = replace(setup, rule=copy.deepcopy(setup.rule))  # a rule may have state of its own
    backup = _server(w, apart, w.servers, shards[before], other)
    release(w.flat)
    w.transport.spawn(partial(other.serve, backup))
    own.serve(primary)


def _server(
    w: Worker, setup: ServerSetup, server_ranks: Sequence[int], spans: list[Span], endpoint: Endpoint | None = None
) -> ShardServer:
    """The server of a shard, with a copy of its weights."""
    when, rule, tree = setup.when, setup.rule, setup.tree
    weights = [w.flat.weights(span) for span in spans]
    copies = [UNCHARGED.clone(x) for x in weights]
    own = partial(WeightSlice, w.ops, slots=w.flat.slots, rule=rule, knows_seen=True)
    slices = [own(span, x) for span, x in zip(spans, copies, strict=True)]
    aggregators = tree.aggregators(w.workers) if tree else []
    clients = len(aggregators or w.worker_ranks)
    slots = pending_slots(when, clients) + clients  # a shard that follows may receive gradients before their order
    clocks = ClockTable(clients, 0, slots, pending_ranks=() if tree else w.worker_ranks[len(w.workers) :])
    seen = [[x.clone() for x in weights] for _ in w.worker_ranks] if "seen" in rule.needs else ()
    separate = when.merges and (any(corrects(one.rule) for one in slices) or when.admit(WAITING))
    codecs = [codec_for_span(tree.what if tree else setup.codec, span, w.flat.slots) for span in spans]
    decode = "on_push" if separate else decode_when_applied(codecs)
    pending = PendingGradients(w.ops, codecs, copies, decode, len(w.flat.slots))
    shard = Shard(w.ops, slices, when, clocks, pending, w.batch_size, seen, len(w.workers))
    return ShardServer(w, shard, server_ranks, aggregators, endpoint)
