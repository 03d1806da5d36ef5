"""Bounded staleness: a worker may be ahead of the slowest one, but not too far."""

from __future__ import annotations

from typing import Literal

from manyhands.codecs import Raw
from manyhands.consistency import Stale
from manyhands.core.codec import Codec
from manyhands.core.rule import Rule
from manyhands.rules import Sgd
from manyhands.strategies.cached import Cached
from manyhands.strategies.server import Server

__all__ = ["ssp"]


def ssp(
    staleness: int = 3,
    lr: float = 0.05,
    cache: bool = False,
    rule: Rule | None = None,
    codec: Codec | None = None,
    shard: Literal["size", "layer", "round-robin"] = "size",
    groups: int = 0,
    replicas: Literal[1, 2] = 1,
) -> Server:
    """Stale synchronous parallel: a worker may be ahead of the slowest one by a bounded number of clocks.

    split: data. when: stale(s). who: parameter-server shards. what: any codec. how: any rule, at the shard.

        worker at clock c: pull w (waits while c - slowest clock > s); push g; c <- c + 1
        shard:             w <- w - eta g, every worker's update in full (a sum, not a mean)

    A worker sees every update up to clock c - s - 1, all of its own, and perhaps newer ones. With s = 0 it is bsp with
    eta P; with s unbounded it is fully asynchronous. With a cache a worker reads only when its last read is more than s
    clocks old, and until then adds its own updates to the cached weights. The run continues without a lost worker, if
    no shard is lost with it: on one host, or with servers. Otherwise the run ends. A lost server ends the run, unless
    replicas is 2. Workers do not wait for a lost one.

    Reference: Q. Ho et al., More effective distributed ML via a stale synchronous parallel parameter server, 2013
    Loops: strategies/server.py Server.step; servers/shard_server.py ShardServer.serve; servers/shard.py Shard.push;
        servers/shard.py Shard.pull; consistency/stale.py Stale; strategies/cached.py Cached._pull

    Args:
        staleness: s, how many clocks a worker may be ahead of the slowest one.
        lr: eta, the learning rate of every single update: the more workers, the smaller it should be.
        cache: keep what was read for as long as the staleness bound allows.
        rule: how a gradient is applied, instead of SGD with lr.
        codec: how a push is encoded, such as half() or feedback(topk(0.01)); raw if not given.
        shard: how weights are divided among servers: into spans of equal size (size), or by whole layers, balanced
            (layer) or in turn (round-robin).
        groups: number of groups of workers, each with an aggregator as in hierarchical-server; 0: none.
        replicas: servers per shard; with 2 the run continues without a lost server.
    """
    kind = Cached if cache else Server
    return kind(Stale(staleness), rule or Sgd(lr), codec or Raw(), shard, groups=groups, copies=replicas)
