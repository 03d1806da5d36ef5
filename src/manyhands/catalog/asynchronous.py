"""Asynchronous methods: nobody waits for the others' steps."""

from __future__ import annotations

from typing import Literal

from manyhands.codecs import Raw
from manyhands.consistency import Free
from manyhands.core.protocols import Codec, Rule
from manyhands.rules import Adagrad, Sgd
from manyhands.strategies.pairwise import Pairwise
from manyhands.strategies.server import Server
from manyhands.strategies.shared_memory import SharedMemory

__all__ = ["ad_psgd", "downpour", "hogwild"]


def downpour(
    lr: float = 0.03,
    n_fetch: int = 1,
    n_push: int = 1,
    prefetch: bool = True,
    phase: Literal["start", "end"] = "start",
    local_lr: float = 0.1,
    rule: Rule | None = None,
    codec: Codec | None = None,
    shard: Literal["size", "layer"] = "size",
) -> Server:
    """Downpour SGD: clients fetch and push when it suits them, Adagrad at the server smooths what comes.

    split: data. when: free. who: parameter-server shards. what: any codec. how: Adagrad at the shard.

        client: every n_fetch steps fetch w -> p;  g = gradient(p);  accrued += g;  p <- p - alpha g
                every n_push steps push accrued, accrued = 0
        shard:  h <- h + g^2;  w <- w - gamma g / sqrt(h), whoever comes

    Shards apply on their own: at any instant they may have seen different updates. A lost client is not
    missed, if the shards are not its own: on one host, or with servers. Otherwise the run ends.

    Reference: J. Dean et al., Large scale distributed deep networks, 2012
    Loops: strategies/server.py Server.step; topology/servers/messages.py Keeper.serve;
        topology/servers/shard.py Shard.push; consistency/free.py Free

    Args:
        lr: gamma, the learning rate of Adagrad at the server.
        n_fetch: steps between two fetches.
        n_push: steps between two pushes.
        prefetch: fetch right after pushing, before the next step is due.
        phase: a period of n_push steps begins (start, as in the paper's appendix) or ends (end) with its push.
        local_lr: alpha, the learning rate of a client's own steps between fetches.
        rule: how the server applies a gradient, instead of Adagrad with lr.
        codec: what a push looks like on the wire; raw if not given.
        shard: whether servers keep equal stretches of the weights (size) or whole layers (layer).
    """
    return Server(Free(), rule or Adagrad(lr), codec or Raw(), shard, n_fetch, n_push, prefetch, phase, local_lr)


def ad_psgd(
    lr: float = 0.1,
    graph: Literal["ring", "complete", "exponential", "torus"] = "ring",
    bipartite: bool = False,
    rule: Rule | None = None,
) -> Pairwise:
    """Asynchronous decentralised SGD: after each gradient a worker averages with one random neighbour.

    split: data. when: never in lock step. who: one neighbour of a peer graph. what: raw. how: any rule, on
    the worker's own weights.

        g = gradient(x^), x^ read after the last own step; others may move x meanwhile
        x_i, x_j <- (x_i + x_j) / 2, atomically, with a random neighbour j
        x_i <- x_i - eta g

    The mean of all x is what is evaluated and saved. A peer answers also while it computes. A lost worker
    is not chosen any more.

    Reference: X. Lian et al., Asynchronous decentralized parallel SGD, 2018, arXiv:1710.06952
    Loops: strategies/pairwise.py Pairwise.step; strategies/pairwise.py Pairwise.communicate;
        strategies/pairwise.py Pairwise.consider

    Args:
        lr: eta, the learning rate.
        graph: who is whose neighbour.
        bipartite: even ranks only initiate and odd ones only answer, as in the paper.
        rule: how a worker applies its gradient, instead of SGD with lr.
    """
    return Pairwise(rule or Sgd(lr), graph, bipartite)


def hogwild(lr: float = 0.05, rule: Rule | None = None) -> SharedMemory:
    """Hogwild!: all workers of one host read and write the same weights without any lock.

    split: data. when: never. who: everyone, through one memory. what: nothing is sent. how: any rule,
    straight into the shared weights.

        read w, compute g, w_v <- w_v - eta g_v for every v that g touches

    Writes may be lost; with sparse gradients few are. All workers must be on one host. A lost worker is not
    missed.

    Reference: F. Niu, B. Recht, C. Re, S. Wright, Hogwild!: a lock-free approach to parallelizing SGD, 2011
    Loops: strategies/shared_memory.py SharedMemory.step

    Args:
        lr: gamma, the learning rate.
        rule: how a gradient is applied, instead of SGD with lr; its memory is each worker's own.
    """
    return SharedMemory(rule or Sgd(lr))
