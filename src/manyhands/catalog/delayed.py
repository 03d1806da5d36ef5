"""Delay-aware asynchronous methods: an update depends on the staleness of its gradient."""

from __future__ import annotations

from typing import Literal

from manyhands.codecs import Raw
from manyhands.consistency import Free
from manyhands.core.codec import Codec
from manyhands.core.rule import Rule
from manyhands.rules import (
    AdaptiveDamping,
    AgeAware,
    DelayCompensation,
    Momentum,
    Sgd,
    StalenessAware,
    TotalMomentum,
    chain,
)
from manyhands.strategies.server import Server

__all__ = ["adag", "agn", "asgd_momentum", "dc_asgd", "dyn_sgd", "staleness_aware"]


def dc_asgd(
    lr: float = 0.05,
    strength: float | None = None,
    adaptive: bool = False,
    decay: float = 0.95,
    eps: float = 1e-7,
    mean_squares: int = 1,
    rule: Rule | None = None,
    codec: Codec | None = None,
    shard: Literal["size", "layer", "round-robin"] = "size",
    replicas: Literal[1, 2] = 1,
) -> Server:
    """DC-ASGD: a stale gradient is corrected for the movement of the weights since they were read.

    split: data. when: free. who: parameter-server shards. what: any codec. how: delay compensation, then any
    rule, at the shard.

        worker k: pull w;  g = gradient(w);  push g
        shard:    at a pull w_k <- w;  at a push
                  w <- w - eta (g + lambda g^2 (w - w_k))                    g^2: element by element
        adaptive: s <- m s + (1 - m) g^2;  lambda = lambda0 / sqrt(s + eps)

    The gradient at w is approximated to first order, with lambda g^2 in place of the curvature. Servers keep a copy of
    the weights per worker. The run continues without a lost worker, if no shard is lost with it: on one host, or with
    servers. Otherwise the run ends. A lost server ends the run, unless replicas is 2.

    Reference: S. Zheng et al., Asynchronous stochastic gradient descent with delay compensation, 2017,
        arXiv:1609.08326
    Loops: strategies/server.py Server.step; servers/shard_server.py ShardServer.serve; servers/shard.py Shard.push;
        rules/delay.py DelayCompensation

    Args:
        lr: eta, the learning rate.
        strength: lambda0, how strongly a gradient is corrected; 0.04 if not given, 2 if adaptive.
        adaptive: divide lambda0 by the root of the recent mean square of the gradient (DC-ASGD-a).
        decay: m, the decay of the mean square.
        eps: added under the root.
        mean_squares: how many mean squares a shard keeps: one for all workers, or one per worker.
        rule: how the corrected gradient is applied, instead of SGD with lr.
        codec: how a push is encoded; raw if not given.
        shard: how weights are divided among servers: into spans of equal size (size), or by whole layers, balanced
            (layer) or in turn (round-robin).
        replicas: servers per shard; with 2 the run continues without a lost server.
    """
    usual = 2.0 if adaptive else 0.04
    link = DelayCompensation(usual if strength is None else strength, adaptive, decay, eps, mean_squares)
    return Server(Free(), chain(link, rule or Sgd(lr)), codec or Raw(), shard, prefetch=True, copies=replicas)


def staleness_aware(
    lr: float = 0.15,
    rule: Rule | None = None,
    codec: Codec | None = None,
    shard: Literal["size", "layer", "round-robin"] = "size",
    replicas: Literal[1, 2] = 1,
) -> Server:
    """Staleness-aware SGD: the learning rate of a gradient is divided by its staleness.

    split: data. when: free. who: parameter-server shards. what: any codec. how: any rule, at the shard, with
    the gradient divided by max(1, tau).

        worker: pull w at version v_k;  g = gradient(w);  push g
        shard:  tau = v - v_k;  w <- w - (eta / max(1, tau)) g;  v <- v + 1

    With two alternating workers tau is 1 and nothing changes; with many of them the sum of their steps stays about that
    of one. The run continues without a lost worker, if no shard is lost with it: on one host, or with servers.
    Otherwise the run ends. A lost server ends the run, unless replicas is 2.

    Reference: W. Zhang, S. Gupta, X. Lian, J. Liu, Staleness-aware async-SGD for distributed deep learning, 2016,
        arXiv:1511.05950
    Loops: strategies/server.py Server.step; servers/shard_server.py ShardServer.serve; servers/shard.py Shard.push;
        rules/delay.py StalenessAware

    Args:
        lr: eta, the learning rate of a gradient that is not stale.
        rule: how the divided gradient is applied, instead of SGD with lr.
        codec: how a push is encoded; raw if not given.
        shard: how weights are divided among servers: into spans of equal size (size), or by whole layers, balanced
            (layer) or in turn (round-robin).
        replicas: servers per shard; with 2 the run continues without a lost server.
    """
    step = chain(StalenessAware(), rule or Sgd(lr))
    return Server(Free(), step, codec or Raw(), shard, prefetch=True, copies=replicas)


def dyn_sgd(
    lr: float = 0.3,
    rule: Rule | None = None,
    codec: Codec | None = None,
    shard: Literal["size", "layer", "round-robin"] = "size",
    replicas: Literal[1, 2] = 1,
) -> Server:
    """DynSGD: an update is scaled down by the number of updates since its worker read the weights.

    split: data. when: free. who: parameter-server shards. what: any codec. how: any rule, at the shard, with
    the gradient divided by tau + 1.

        worker: pull w at version v_k;  g = gradient(w);  push g
        shard:  tau = v - v_k;  w <- w - eta g / (tau + 1);  v <- v + 1

    Unlike in staleness-aware SGD, a gradient of staleness 1 is already halved. The run continues without a lost worker,
    if no shard is lost with it: on one host, or with servers. Otherwise the run ends. A lost server ends the run,
    unless replicas is 2.

    Reference: J. Jiang, B. Cui, C. Zhang, L. Yu, Heterogeneity-aware distributed parameter servers, 2017,
        doi:10.1145/3035918.3035933
    Loops: strategies/server.py Server.step; servers/shard_server.py ShardServer.serve; servers/shard.py Shard.push;
        rules/delay.py AgeAware

    Args:
        lr: eta, the learning rate of a gradient that is not stale.
        rule: how the divided gradient is applied, instead of SGD with lr.
        codec: how a push is encoded; raw if not given.
        shard: how weights are divided among servers: into spans of equal size (size), or by whole layers, balanced
            (layer) or in turn (round-robin).
        replicas: servers per shard; with 2 the run continues without a lost server.
    """
    return Server(Free(), chain(AgeAware(), rule or Sgd(lr)), codec or Raw(), shard, prefetch=True, copies=replicas)


def agn(
    lr: float = 0.3,
    period: int = 5,
    local_lr: float | None = None,
    rule: Rule | None = None,
    codec: Codec | None = None,
    shard: Literal["size", "layer", "round-robin"] = "size",
    replicas: Literal[1, 2] = 1,
) -> Server:
    """Accumulated gradient normalization: workers take several local steps, then push the mean of their gradients.

    split: data. when: free. who: parameter-server shards, every period steps. what: any codec. how: any rule, at
    the shard.

        worker: pull w -> p;  lambda times: g = gradient(p), a <- a + g, p <- p - eta g
                push a / lambda, a = 0
        shard:  w <- w - eta a / lambda, at every push

    A push has the length of one step and the direction of many. With lambda = 1 it is downpour with a fixed rate. The
    run continues without a lost worker, if no shard is lost with it: on one host, or with servers. Otherwise the run
    ends. A lost server ends the run, unless replicas is 2.

    Reference: J. Hermans, G. Spanakis, R. Moeckel, Accumulated gradient normalization, 2017, arXiv:1710.02368
    Loops: strategies/server.py Server.step; strategies/server.py Server._accrue;
        servers/shard_server.py ShardServer.serve; servers/shard.py Shard.push

    Args:
        lr: eta, the learning rate.
        period: lambda, steps between two pushes.
        local_lr: the learning rate of a worker's own steps; lr if not given.
        rule: how the server applies the mean gradient, instead of SGD with lr.
        codec: how a push is encoded; raw if not given.
        shard: how weights are divided among servers: into spans of equal size (size), or by whole layers, balanced
            (layer) or in turn (round-robin).
        replicas: servers per shard; with 2 the run continues without a lost server.
    """
    local = lr if local_lr is None else local_lr
    step = rule or Sgd(lr)
    what = codec or Raw()
    return Server(Free(), step, what, shard, period, period, True, "end", local, push_mean=True, copies=replicas)


def adag(
    lr: float = 0.3,
    period: int = 5,
    gamma: float | None = None,
    local_lr: float | None = None,
    rule: Rule | None = None,
    codec: Codec | None = None,
    shard: Literal["size", "layer", "round-robin"] = "size",
    replicas: Literal[1, 2] = 1,
) -> Server:
    """ADAG: accumulated gradients as in agn, damped in coordinates that have moved since the worker read them.

    split: data. when: free. who: parameter-server shards, every period steps. what: any codec. how: adaptive
    damping, then any rule, at the shard.

        worker: pull w -> p;  lambda times: g = gradient(p), a <- a + g, p <- p - eta g
                push a / lambda, a = 0
        shard:  at a pull of worker k m_k <- w;  at a push
                w <- w - eta (a / lambda) / (1 + (w - m_k)^2 / gamma)        element by element

    If no other push was applied in between, or with gamma unbounded, it is agn. The run continues without a lost
    worker, if no shard is lost with it: on one host, or with servers. Otherwise the run ends. A lost server ends the
    run, unless replicas is 2.

    Reference: J. Hermans, On scalable deep learning and parallelizing gradient descent (thesis), 2017
    Loops: strategies/server.py Server.step; strategies/server.py Server._accrue;
        servers/shard_server.py ShardServer.serve; servers/shard.py Shard.push; rules/delay.py AdaptiveDamping

    Args:
        lr: eta, the learning rate.
        period: lambda, steps between two pushes.
        gamma: the squared distance at which a coordinate is halved; lr if not given, as in the thesis.
        local_lr: the learning rate of a worker's own steps; lr if not given.
        rule: how the server applies the damped gradient, instead of SGD with lr.
        codec: how a push is encoded; raw if not given.
        shard: how weights are divided among servers: into spans of equal size (size), or by whole layers, balanced
            (layer) or in turn (round-robin).
        replicas: servers per shard; with 2 the run continues without a lost server.
    """
    local = lr if local_lr is None else local_lr
    step = chain(AdaptiveDamping(lr if gamma is None else gamma), rule or Sgd(lr))
    what = codec or Raw()
    return Server(Free(), step, what, shard, period, period, True, "end", local, push_mean=True, copies=replicas)


def asgd_momentum(
    lr: float = 0.05,
    total: float = 0.9,
    momentum: float | None = None,
    codec: Codec | None = None,
    shard: Literal["size", "layer", "round-robin"] = "size",
    replicas: Literal[1, 2] = 1,
) -> Server:
    """Asynchronous SGD with momentum: the shard adds only what asynchrony does not already contribute.

    split: data. when: free. who: parameter-server shards. what: any codec. how: momentum at the shard.

        worker: pull w;  g = gradient(w);  push g
        shard:  m <- mu m + g;  w <- w - eta m
                mu = mu* - (1 - 1/M) with M workers; negative if asynchrony contributes more than mu*, at least -0.9

    With M independent workers the weights move as if they had momentum 1 - 1/M. So the best mu falls as M grows. The
    run continues without a lost worker, if no shard is lost with it: on one host, or with servers. Otherwise the run
    ends. A lost server ends the run, unless replicas is 2. mu is not changed when a worker is lost.

    Reference: I. Mitliagkas, C. Zhang, S. Hadjis, C. Re, Asynchrony begets momentum, with an application to deep
        learning, 2016, arXiv:1605.09774
    Loops: strategies/server.py Server.step; servers/shard_server.py ShardServer.serve; servers/shard.py Shard.push;
        rules/total_momentum.py TotalMomentum

    Args:
        lr: eta, the learning rate.
        total: mu*, the best momentum of one worker.
        momentum: mu, the momentum at the shard, instead of the part of mu* that is left; may be negative.
        codec: how a push is encoded; raw if not given.
        shard: how weights are divided among servers: into spans of equal size (size), or by whole layers, balanced
            (layer) or in turn (round-robin).
        replicas: servers per shard; with 2 the run continues without a lost server.
    """
    rule = TotalMomentum(lr, total) if momentum is None else Momentum(lr, momentum)
    return Server(Free(), rule, codec or Raw(), shard, prefetch=True, copies=replicas)
