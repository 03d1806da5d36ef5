"""In between: workers may run ahead of each other, but not too far."""

from __future__ import annotations

from typing import Literal

from manyhands.codecs import Raw
from manyhands.consistency import Stale
from manyhands.core.protocols import Codec, Rule
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
    eta P; with s unbounded it is total asynchrony. With a cache a worker reads only when what it has read is more than
    s clocks old, and meanwhile adds its own updates to that. A lost worker no longer holds anyone up, if the shards are
    not its own: on one host, or with servers. Otherwise a shard dies with it, and the run ends. A lost server ends the
    run, unless replicas is 2.

    Reference: Q. Ho et al., More effective distributed ML via a stale synchronous parallel parameter server, 2013
    Loops: strategies/server.py Server.step; topology/servers/messages.py Keeper.serve;
        topology/servers/shard.py Shard.push; topology/servers/shard.py Shard.pull;
        consistency/stale.py Stale; strategies/cached.py Cached.pull

    Args:
        staleness: s, how many clocks a worker may be ahead of the slowest one.
        lr: eta, the learning rate of every single update: the more workers, the smaller it should be.
        cache: keep what was read for as long as it may be used.
        rule: how a gradient is applied, instead of SGD with lr.
        codec: what a push looks like on the wire, such as half() or feedback(topk(0.01)); raw if not given.
        shard: whether servers keep equal stretches of weights (size) or whole layers (layer, or in turn: round-robin).
        groups: how many groups of workers come to the shards as one each, as in hierarchical-server; 0: none.
        replicas: how many servers keep each shard; with 2 a lost server is not missed.
    """
    kind = Cached if cache else Server
    return kind(Stale(staleness), rule or Sgd(lr), codec or Raw(), shard, groups=groups, copies=replicas)
