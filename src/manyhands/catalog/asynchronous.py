"""Asynchronous methods: no worker waits for the steps of others."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from manyhands.codecs import Raw
from manyhands.consistency import Free
from manyhands.core.codec import Codec
from manyhands.core.rule import Rule
from manyhands.rules import Adagrad, Sgd
from manyhands.strategies.pairwise import Pairwise
from manyhands.strategies.server import Server
from manyhands.strategies.shared_memory import SharedMemory
from manyhands.strategies.svrg import Svrg

__all__ = ["ad_psgd", "asysvrg", "downpour", "hogbatch", "hogwild"]


def downpour(
    lr: float = 0.03,
    n_fetch: int = 1,
    n_push: int = 1,
    prefetch: bool = True,
    phase: Literal["start", "end"] = "start",
    local_lr: float = 0.1,
    warm_start: int = 0,
    rule: Rule | None = None,
    codec: Codec | None = None,
    shard: Literal["size", "layer", "round-robin"] = "size",
    groups: int = 0,
    replicas: Literal[1, 2] = 1,
) -> Server:
    """Downpour SGD: clients fetch and push independently, and the server applies each push with Adagrad.

    split: data. when: free. who: parameter-server shards. what: any codec. how: Adagrad at the shard.

        client: every n_fetch steps fetch w -> p;  g = gradient(p);  accrued += g;  p <- p - alpha g
                every n_push steps push accrued, accrued = 0
        shard:  h <- h + g^2;  w <- w - gamma g / sqrt(h), at every push

    Shards apply gradients independently: at any moment they may have applied different pushes. With a warm start the
    first client trains alone for a while, because early updates are large, and stale ones among them do harm. The run
    continues without a lost client, if no shard is lost with it: on one host, or with servers. Otherwise the run ends.
    A lost server ends the run, unless replicas is 2.

    Reference: J. Dean et al., Large scale distributed deep networks, 2012
    Loops: strategies/server.py Server.step; servers/shard_server.py ShardServer.serve; servers/shard.py Shard.push;
        consistency/free.py Free

    Args:
        lr: gamma, the learning rate of Adagrad at the server.
        n_fetch: steps between two fetches.
        n_push: steps between two pushes.
        prefetch: fetch right after pushing, before the next step is due.
        phase: whether a period of n_push steps begins with its push (start, as in the paper's appendix) or ends with it
            (end).
        local_lr: alpha, the learning rate of a client's own steps between fetches.
        warm_start: steps that the first client takes alone before the others begin.
        rule: how the server applies a gradient, instead of Adagrad with lr.
        codec: how a push is encoded; raw if not given.
        shard: how weights are divided among servers: into spans of equal size (size), or by whole layers, balanced
            (layer) or in turn (round-robin).
        groups: number of groups of workers, each with an aggregator as in hierarchical-server; 0: none.
        replicas: servers per shard; with 2 the run continues without a lost server.
    """
    when, how, what, every = Free(), rule or Adagrad(lr), codec or Raw(), (n_fetch, n_push)
    usual = Server(when, how, what, shard, *every, prefetch, phase, local_lr)
    return replace(usual, warm_start=warm_start, groups=groups, copies=replicas)


def ad_psgd(
    lr: float = 0.1,
    graph: Literal["ring", "complete", "exponential", "torus", "random"] = "ring",
    bipartite: bool = False,
    rule: Rule | None = None,
    codec: Codec | None = None,
) -> Pairwise:
    """Asynchronous decentralised SGD: after each gradient a worker averages with one random neighbour.

    split: data. when: never in lock step. who: one neighbour of a peer graph. what: raw, or any codec that
    only rounds. how: any rule, on the worker's own weights.

        g = gradient(x^), x^ read after the last own step; x may change while g is computed
        x_i, x_j <- (x_i + x_j) / 2, atomically, with a random neighbour j
        x_i <- x_i - eta g

    The mean of all x is evaluated and saved. A worker answers requests while it computes. The run continues without a
    lost worker, which is no longer chosen.

    Reference: X. Lian et al., Asynchronous decentralized parallel stochastic gradient descent, 2018, arXiv:1710.06952
    Loops: strategies/pairwise.py Pairwise.step; peers/exchanges.py PeerLoop; peers/exchanges.py PairwiseAverage

    Args:
        lr: eta, the learning rate.
        graph: the neighbours of each worker; a random graph is the union of two rings drawn from the seed.
        bipartite: even ranks only initiate exchanges and odd ranks only answer, as in the paper.
        rule: how a worker applies its gradient, instead of SGD with lr.
        codec: how x is encoded, by a codec that only rounds, such as half() or half("bf16"); raw if not given.
    """
    return Pairwise(rule or Sgd(lr), graph, bipartite, codec)


def hogwild(lr: float = 0.05, rule: Rule | None = None) -> SharedMemory:
    """Hogwild!: all workers of one host read and write the same weights without any lock.

    split: data. when: never. who: all workers, through shared memory. what: nothing is sent. how: any rule, directly on
    the shared weights.

        read w, compute g, w_v <- w_v - eta g_v for every v that g touches

    Concurrent writes may be lost. With sparse gradients, as of nn.Embedding(sparse=True), few are: plain SGD then
    writes only the rows that a mini-batch has used. A model that computes its own sparse step, as that of the task
    sparse, writes it directly. All workers must be on one host. The run continues without a lost worker.

    Reference: F. Niu, B. Recht, C. Re, S. Wright, Hogwild!: a lock-free approach to parallelizing stochastic gradient
        descent, 2011
    Loops: strategies/shared_memory/shared_memory.py SharedMemory.step;
        strategies/shared_memory/shared_memory.py SharedMemory._write; strategies/shared_memory/descent.py descend

    Args:
        lr: eta, the learning rate.
        rule: how a gradient is applied, instead of SGD with lr; every worker has its own optimizer state.
    """
    return SharedMemory(rule or Sgd(lr))


def hogbatch(lr: float = 0.04, rule: Rule | None = None) -> SharedMemory:
    """HogBatch: as Hogwild!, but each worker computes on a copy of the weights and writes one update per mini-batch.

    split: data. when: never. who: all workers, through shared memory. what: nothing is sent. how: any rule, directly on
    the shared weights.

        x <- w, a copy;  g = (1/b) sum_i grad f_i(x) over a mini-batch of b
        w_v <- w_v - eta g_v for every v that g touches, without a lock

    Workers access the shared weights twice per mini-batch instead of once per sample: fewer writes are lost, and cache
    lines move less often between cores. With b = 1 it is hogwild. All workers must be on one host. The run continues
    without a lost worker.

    Reference: S. Sallinen et al., High performance parallel stochastic gradient descent in shared memory, 2016
    Loops: strategies/shared_memory/shared_memory.py SharedMemory.step;
        strategies/shared_memory/shared_memory.py SharedMemory._write

    Args:
        lr: eta, the learning rate; the gradient is a mean over the mini-batch.
        rule: how a gradient is applied, instead of SGD with lr; every worker has its own optimizer state.
    """
    return SharedMemory(rule or Sgd(lr), snapshot=True)


def asysvrg(
    lr: float = 0.05,
    full_steps: int | None = None,
    inner_steps: int | None = None,
    rule: Rule | None = None,
) -> Svrg:
    """AsySVRG: lock-free steps whose variance is reduced by a full gradient, computed once per epoch.

    split: data. when: two barriers per epoch, none in between. who: all workers, through shared memory. what: nothing
    is sent. how: any rule, directly on the shared weights.

        epoch: u0 <- u;  mu = (1/n) sum_i grad f_i(u0), each worker over its own samples;  barrier
        inner: read u^ from u;  v = grad f_B(u^) - grad f_B(u0) + mu;  u <- u - eta v, without a lock;  barrier

    At u^ = u0 the variance is zero, so the learning rate can stay constant to the end. An epoch consumes one pass over
    the data for mu and two for inner steps, each of which computes two gradients. All workers must be on one host. A
    lost worker ends the run: its share of mu would be missing.

    Reference: S. Zhao, W. Li, Fast asynchronous parallel stochastic gradient descent: a lock-free approach with
        convergence guarantee, 2016, arXiv:1508.05711
    Loops: strategies/svrg.py Svrg.step; strategies/svrg.py Svrg._descend

    Args:
        lr: eta, the learning rate of inner steps.
        full_steps: mini-batches per worker that mu is the mean of; if not given, as many as hold all samples, or 4 if
            these cannot be counted.
        inner_steps: M, mini-batches per worker until the next epoch; twice as many if not given.
        rule: how v is applied, instead of SGD with lr; every worker has its own optimizer state.
    """
    return Svrg(rule or Sgd(lr), full_steps, inner_steps)
