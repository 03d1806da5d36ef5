"""Asynchronous methods: nobody waits for the others' steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from manyhands.codecs import Raw
from manyhands.consistency import Free
from manyhands.core.protocols import Codec, Rule
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
    """Downpour SGD: clients fetch and push when it suits them, Adagrad at the server smooths what comes.

    split: data. when: free. who: parameter-server shards. what: any codec. how: Adagrad at the shard.

        client: every n_fetch steps fetch w -> p;  g = gradient(p);  accrued += g;  p <- p - alpha g
                every n_push steps push accrued, accrued = 0
        shard:  h <- h + g^2;  w <- w - gamma g / sqrt(h), whoever comes

    Shards apply on their own: at any instant they may have seen different updates. With a warm start the first client
    trains alone for a while, since early updates are large, and harmful when they are late. A lost client is not
    missed, if the shards are not its own: on one host, or with servers. Otherwise the run ends. A lost server ends the
    run, unless replicas is 2.

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
        warm_start: steps that the first client takes alone before the others begin.
        rule: how the server applies a gradient, instead of Adagrad with lr.
        codec: what a push looks like on the wire; raw if not given.
        shard: whether servers keep equal stretches of weights (size) or whole layers (layer, or in turn: round-robin).
        groups: how many groups of workers come to the shards as one each, as in hierarchical-server; 0: none.
        replicas: how many servers keep each shard; with 2 a lost server is not missed.
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

        g = gradient(x^), x^ read after the last own step; others may move x meanwhile
        x_i, x_j <- (x_i + x_j) / 2, atomically, with a random neighbour j
        x_i <- x_i - eta g

    The mean of all x is what is evaluated and saved. A peer answers also while it computes. A lost worker
    is not chosen any more.

    Reference: X. Lian et al., Asynchronous decentralized parallel stochastic gradient descent, 2018, arXiv:1710.06952
    Loops: strategies/pairwise.py Pairwise.step; strategies/pairwise.py Pairwise.communicate;
        topology/peers/exchanges.py Pairing

    Args:
        lr: eta, the learning rate.
        graph: who is whose neighbour; a random one, drawn from the seed, is two rings at once.
        bipartite: even ranks only initiate and odd ones only answer, as in the paper.
        rule: how a worker applies its gradient, instead of SGD with lr.
        codec: what x looks like on the wire, such as half() or half("bf16"): one that only rounds; raw if not given.
    """
    return Pairwise(rule or Sgd(lr), graph, bipartite, codec)


def hogwild(lr: float = 0.05, rule: Rule | None = None) -> SharedMemory:
    """Hogwild!: all workers of one host read and write the same weights without any lock.

    split: data. when: never. who: everyone, through one memory. what: nothing is sent. how: any rule,
    straight into the shared weights.

        read w, compute g, w_v <- w_v - eta g_v for every v that g touches

    Writes may be lost. With sparse gradients, as of nn.Embedding(sparse=True), few are: plain SGD then writes only
    the rows a mini-batch has used. A model that knows these itself, as that of the task sparse, is let write them. All
    workers must be on one host. A lost worker is not missed.

    Reference: F. Niu, B. Recht, C. Re, S. Wright, Hogwild!: a lock-free approach to parallelizing stochastic gradient
        descent, 2011
    Loops: strategies/shared_memory.py SharedMemory.step; strategies/shared_memory.py SharedMemory.write;
        strategies/shared_memory.py SharedMemory.descend

    Args:
        lr: gamma, the learning rate.
        rule: how a gradient is applied, instead of SGD with lr; its memory is each worker's own.
    """
    return SharedMemory(rule or Sgd(lr))


def hogbatch(lr: float = 0.04, rule: Rule | None = None) -> SharedMemory:
    """HogBatch: as Hogwild!, but each worker computes on a copy of the weights and writes one update per mini-batch.

    split: data. when: never. who: everyone, through one memory. what: nothing is sent. how: any rule,
    straight into the shared weights.

        x <- w, a copy;  g = (1/b) sum_i grad f_i(x) over a mini-batch of b
        w_v <- w_v - eta g_v for every v that g touches, without a lock

    Workers meet in memory twice per mini-batch and not with every sample: fewer writes are lost, and caches are
    left alone in between. With b = 1 it is hogwild. All workers must be on one host. A lost worker is not missed.

    Reference: S. Sallinen et al., High performance parallel stochastic gradient descent in shared memory, 2016
    Loops: strategies/shared_memory.py SharedMemory.step; strategies/shared_memory.py SharedMemory.write

    Args:
        lr: eta, the learning rate; the gradient is a mean over the mini-batch.
        rule: how a gradient is applied, instead of SGD with lr; its memory is each worker's own.
    """
    return SharedMemory(rule or Sgd(lr), snapshot=True)


def asysvrg(
    lr: float = 0.05,
    full_steps: int | None = None,
    inner_steps: int | None = None,
    rule: Rule | None = None,
) -> Svrg:
    """AsySVRG: lock-free steps with little noise: a full gradient, computed once per epoch, corrects every small one.

    split: data. when: all meet twice per epoch, in between never. who: everyone, through one memory. what:
    nothing is sent. how: any rule, straight into the shared weights.

        epoch: u0 <- u;  mu = (1/n) sum_i grad f_i(u0), each worker over its own samples;  all meet
        inner: read u^ from u;  v = grad f_B(u^) - grad f_B(u0) + mu;  u <- u - eta v, without a lock;  all meet

    At u^ = u0 the noise is gone, so the learning rate may stay as it is to the end. An epoch consumes a pass over
    the data for mu and two for inner steps, each of which computes two gradients. All workers must be on one
    host. A lost worker ends the run: its share of mu would be missing.

    Reference: S. Zhao, W. Li, Fast asynchronous parallel stochastic gradient descent: a lock-free approach with
        convergence guarantee, 2016, arXiv:1508.05711
    Loops: strategies/svrg.py Svrg.step; strategies/svrg.py Svrg.descend

    Args:
        lr: eta, the learning rate of inner steps.
        full_steps: mini-batches per worker that mu is the mean of; if not given as many as hold all samples, or 4
            if these cannot be counted.
        inner_steps: M, mini-batches per worker until the next epoch; twice as many if not given.
        rule: how v is applied, instead of SGD with lr; its memory is each worker's own.
    """
    return Svrg(rule or Sgd(lr), full_steps, inner_steps)
