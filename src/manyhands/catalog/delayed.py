"""Asynchronous methods that know how late a gradient is, and do something about it."""

from __future__ import annotations

from typing import Literal

from manyhands.codecs import Raw
from manyhands.consistency import Free
from manyhands.core.protocols import Codec, Rule
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
    """DC-ASGD: a late gradient is corrected for the way the weights have gone since it was computed.

    split: data. when: free. who: parameter-server shards. what: any codec. how: delay compensation, then any
    rule, at the shard.

        worker k: pull w;  g = gradient(w);  push g
        shard:    at a pull w_k <- w;  at a push
                  w <- w - eta (g + lambda g^2 (w - w_k))                    g^2: element by element
        adaptive: s <- m s + (1 - m) g^2;  lambda = lambda0 / sqrt(s + eps)

    The gradient at w is taken to first order, with lambda g^2 in the place of the curvature. Servers keep a copy
    of the weights per worker. A lost worker is not missed, if the shards are not its own: on one host, or with
    servers. Otherwise the run ends. A lost server ends the run, unless replicas is 2.

    Reference: S. Zheng et al., Asynchronous stochastic gradient descent with delay compensation, 2017,
        arXiv:1609.08326
    Loops: strategies/server.py Server.step; topology/servers/messages.py Keeper.serve;
        topology/servers/shard.py Shard.push; rules/delay.py DelayCompensation

    Args:
        lr: eta, the learning rate.
        strength: lambda0, how strongly a gradient is corrected; 0.04 if not given, 2 if adaptive.
        adaptive: divide lambda0 by the root of the recent mean square of the gradient (DC-ASGD-a).
        decay: m, how long the mean square remembers.
        eps: added under the root.
        mean_squares: how many mean squares a shard keeps: one for all workers, or as many as there are workers.
        rule: how the corrected gradient is applied, instead of SGD with lr.
        codec: what a push looks like on the wire; raw if not given.
        shard: whether servers keep equal stretches of weights (size) or whole layers (layer, or in turn: round-robin).
        replicas: how many servers keep each shard; with 2 a lost server is not missed.
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

    With two workers in turn tau is 1 and nothing changes; with many of them the sum of their steps stays about
    that of one. A lost worker is not missed, if the shards are not its own: on one host, or with servers.
    Otherwise the run ends. A lost server ends the run, unless replicas is 2.

    Reference: W. Zhang, S. Gupta, X. Lian, J. Liu, Staleness-aware async-SGD for distributed deep learning, 2016,
        arXiv:1511.05950
    Loops: strategies/server.py Server.step; topology/servers/messages.py Keeper.serve;
        topology/servers/shard.py Shard.push; rules/delay.py StalenessAware

    Args:
        lr: eta, the learning rate of a gradient that is not stale.
        rule: how the divided gradient is applied, instead of SGD with lr.
        codec: what a push looks like on the wire; raw if not given.
        shard: whether servers keep equal stretches of weights (size) or whole layers (layer, or in turn: round-robin).
        replicas: how many servers keep each shard; with 2 a lost server is not missed.
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
    """DynSGD: an update counts the less the more others have come since its worker read the weights.

    split: data. when: free. who: parameter-server shards. what: any codec. how: any rule, at the shard, with
    the gradient divided by tau + 1.

        worker: pull w at version v_k;  g = gradient(w);  push g
        shard:  tau = v - v_k;  w <- w - eta g / (tau + 1);  v <- v + 1

    Unlike in staleness-aware SGD a gradient of staleness 1 counts half already. A lost worker is not missed, if
    the shards are not its own: on one host, or with servers. Otherwise the run ends. A lost server ends the run,
    unless replicas is 2.

    Reference: J. Jiang, B. Cui, C. Zhang, L. Yu, Heterogeneity-aware distributed parameter servers, 2017,
        doi:10.1145/3035918.3035933
    Loops: strategies/server.py Server.step; topology/servers/messages.py Keeper.serve;
        topology/servers/shard.py Shard.push; rules/delay.py AgeAware

    Args:
        lr: eta, the learning rate of a gradient that is not stale.
        rule: how the divided gradient is applied, instead of SGD with lr.
        codec: what a push looks like on the wire; raw if not given.
        shard: whether servers keep equal stretches of weights (size) or whole layers (layer, or in turn: round-robin).
        replicas: how many servers keep each shard; with 2 a lost server is not missed.
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
    """Accumulated gradient normalization: workers explore for some steps, then push the mean of their gradients.

    split: data. when: free. who: parameter-server shards, every period steps. what: any codec. how: any rule, at
    the shard.

        worker: pull w -> p;  lambda times: g = gradient(p), a <- a + g, p <- p - eta g
                push a / lambda, a = 0
        shard:  w <- w - eta a / lambda, whoever comes

    What is pushed has the length of one step and the direction of many. With lambda = 1 it is downpour with a fixed
    rate. A lost worker is not missed, if the shards are not its own: on one host, or with servers. Otherwise the
    run ends. A lost server ends the run, unless replicas is 2.

    Reference: J. Hermans, G. Spanakis, R. Moeckel, Accumulated gradient normalization, 2017, arXiv:1710.02368
    Loops: strategies/server.py Server.step; strategies/server.py Server.accrue;
        topology/servers/messages.py Keeper.serve; topology/servers/shard.py Shard.push

    Args:
        lr: eta, the learning rate.
        period: lambda, steps between two pushes.
        local_lr: the learning rate of a worker's own steps; lr if not given.
        rule: how the server applies the mean gradient, instead of SGD with lr.
        codec: what a push looks like on the wire; raw if not given.
        shard: whether servers keep equal stretches of weights (size) or whole layers (layer, or in turn: round-robin).
        replicas: how many servers keep each shard; with 2 a lost server is not missed.
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
    """ADAG: accumulated gradients as in agn, damped in those coordinates that others have moved meanwhile.

    split: data. when: free. who: parameter-server shards, every period steps. what: any codec. how: adaptive
    damping, then any rule, at the shard.

        worker: pull w -> p;  lambda times: g = gradient(p), a <- a + g, p <- p - eta g
                push a / lambda, a = 0
        shard:  at a pull of worker k m_k <- w;  at a push
                w <- w - eta (a / lambda) / (1 + (w - m_k)^2 / gamma)        element by element

    If nobody came in between, or with gamma unbounded, it is agn. A lost worker is not missed, if the shards are
    not its own: on one host, or with servers. Otherwise the run ends. A lost server ends the run, unless replicas
    is 2.

    Reference: J. Hermans, On scalable deep learning and parallelizing gradient descent (thesis), 2017
    Loops: strategies/server.py Server.step; strategies/server.py Server.accrue;
        topology/servers/messages.py Keeper.serve; topology/servers/shard.py Shard.push;
        rules/delay.py AdaptiveDamping

    Args:
        lr: eta, the learning rate.
        period: lambda, steps between two pushes.
        gamma: the squared distance at which a coordinate counts half; lr if not given, as in the thesis.
        local_lr: the learning rate of a worker's own steps; lr if not given.
        rule: how the server applies the damped gradient, instead of SGD with lr.
        codec: what a push looks like on the wire; raw if not given.
        shard: whether servers keep equal stretches of weights (size) or whole layers (layer, or in turn: round-robin).
        replicas: how many servers keep each shard; with 2 a lost server is not missed.
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
    """Asynchronous SGD with momentum: only as much of it as asynchrony does not bring by itself.

    split: data. when: free. who: parameter-server shards. what: any codec. how: momentum at the shard.

        worker: pull w;  g = gradient(w);  push g
        shard:  m <- mu m + g;  w <- w - eta m
                mu = mu* - (1 - 1/M) with M workers; negative if they bring more than mu*

    With M workers that come when it suits them the weights move as if they had momentum 1 - 1/M. So the best mu
    falls as M grows. A lost worker is not missed, if the shards are not its own: on one host, or with servers;
    mu stays as it was. Otherwise the run ends. A lost server ends the run, unless replicas is 2.

    Reference: I. Mitliagkas, C. Zhang, S. Hadjis, C. Re, Asynchrony begets momentum, with an application to deep
        learning, 2016, arXiv:1605.09774
    Loops: strategies/server.py Server.step; topology/servers/messages.py Keeper.serve;
        topology/servers/shard.py Shard.push; rules/total_momentum.py TotalMomentum

    Args:
        lr: eta, the learning rate.
        total: mu*, the best momentum of one worker.
        momentum: mu, the momentum at the shard, instead of what is left of mu*; may be negative.
        codec: what a push looks like on the wire; raw if not given.
        shard: whether servers keep equal stretches of weights (size) or whole layers (layer, or in turn: round-robin).
        replicas: how many servers keep each shard; with 2 a lost server is not missed.
    """
    rule = TotalMomentum(lr, total) if momentum is None else Momentum(lr, momentum)
    return Server(Free(), rule, codec or Raw(), shard, prefetch=True, copies=replicas)
