"""Synchronous methods: all workers take every step together."""

from __future__ import annotations

from typing import Literal

from manyhands.codecs import Raw
from manyhands.consistency import Bulk
from manyhands.core.protocols import Codec, Rule
from manyhands.rules import Sgd
from manyhands.strategies.allreduce import AllReduce
from manyhands.strategies.elastic import Elastic
from manyhands.strategies.growing_batch import GrowingBatch
from manyhands.strategies.server import Server

__all__ = ["adaptive_batch", "bsp", "bsp_server", "eamsgd", "easgd"]


def bsp(lr: float = 0.3, rule: Rule | None = None, collective: str = "auto") -> AllReduce:
    """Bulk-synchronous SGD: the gradients of all workers are averaged before every step.

    split: data. when: bulk. who: a collective. what: raw. how: any rule, the same on every worker.

        g = (1/P) sum_k g_k(w; B_k)
        w <- w - eta g

    It is SGD with a mini-batch P times as large. A step takes as long as the slowest worker; a lost worker
    ends the run.

    Reference: L. Valiant, A bridging model for parallel computation, 1990
    Loops: strategies/allreduce.py AllReduce.step

    Args:
        lr: eta, the learning rate.
        rule: how the mean gradient is applied, instead of SGD with lr.
        collective: how gradients are summed: auto, native, shared, ring, tree, butterfly or rabenseifner.
    """
    return AllReduce(rule or Sgd(lr), collective)


def bsp_server(
    lr: float = 0.3,
    rule: Rule | None = None,
    codec: Codec | None = None,
    shard: Literal["size", "layer"] = "size",
    replicas: Literal[1, 2] = 1,
) -> Server:
    """Bulk-synchronous SGD through parameter servers: a shard waits for all gradients, then applies their mean.

    split: data. when: bulk. who: parameter-server shards. what: any codec. how: any rule, at the shard.

        worker: pull w; g_k = gradient(w; B_k); push g_k
        shard:  when all P gradients are there: w <- w - eta (1/P) sum_k g_k, summed in the order of ranks

    The result is that of bsp. A lost worker ends the run; so does a lost server, unless replicas is 2.

    Reference: M. Li et al., Scaling distributed machine learning with the parameter server, 2014
    Loops: strategies/server.py Server.step; topology/servers/messages.py Keeper.serve;
        topology/servers/shard.py Shard.push; consistency/bulk.py Bulk

    Args:
        lr: eta, the learning rate.
        rule: how the mean gradient is applied, instead of SGD with lr.
        codec: what a push looks like on the wire, such as half() or feedback(topk(0.01)); raw if not given.
        shard: whether servers keep equal stretches of the weights (size) or whole layers (layer).
        replicas: how many servers keep each shard; with 2 a lost server is not missed.
    """
    return Server(Bulk(), rule or Sgd(lr), codec or Raw(), shard, copies=replicas)


def easgd(
    lr: float = 0.3,
    center_rate: float = 0.9,
    moving_rate: float | None = None,
    period: int = 1,
    asynchronous: bool = False,
    rule: Rule | None = None,
    shard: Literal["size", "layer"] = "size",
) -> Elastic:
    """Elastic averaging SGD: workers explore on their own, tied to a common centre by a spring.

    split: data. when: every period steps, together or each on its own clock. who: a collective, or shards
    of the centre when asynchronous. what: raw. how: the elastic move beside any local rule.

        e_k = alpha (x_k - c)
        x_k <- x_k - eta g_k(x_k) - e_k        the gradient is taken before the elastic move
        c   <- c + sum_k e_k                   asynchronous: c <- c + e_k, one worker at a time

    The centre c is what is evaluated and saved. Synchronous, a lost worker ends the run; asynchronous, the
    others go on, if the centre is not with it: on one host, or with servers.

    Reference: S. Zhang, A. Choromanska, Y. LeCun, Deep learning with elastic averaging SGD, 2015, arXiv:1412.6651
    Loops: strategies/elastic.py Elastic.step; topology/servers/shard.py Shard.exchange

    Args:
        lr: eta, the learning rate of a worker's own steps.
        center_rate: beta, how fast the centre follows the workers.
        moving_rate: alpha, how strongly a worker is pulled to the centre; beta / P if not given.
        period: tau, steps between two elastic moves.
        asynchronous: every worker meets the centre on its own clock.
        rule: how a worker applies its own gradient, instead of SGD with lr.
        shard: how the centre is cut over servers when asynchronous.
    """
    return Elastic(rule or Sgd(lr), center_rate, moving_rate, period, asynchronous, shard)


def eamsgd(
    lr: float = 0.03,
    momentum: float = 0.9,
    center_rate: float = 0.9,
    moving_rate: float | None = None,
    period: int = 1,
    asynchronous: bool = False,
    rule: Rule | None = None,
    shard: Literal["size", "layer"] = "size",
) -> Elastic:
    """Elastic averaging with momentum: like easgd, but a worker's own moves have inertia; the spring has none.

    split: data. when: every period steps, together or each on its own clock. who: a collective, or shards
    of the centre when asynchronous. what: raw. how: the elastic move beside Nesterov momentum on any local rule.

        e_k = alpha (x_k - c)
        v_k <- delta v_k - eta g_k(x_k + delta v_k)
        x_k <- x_k + v_k - e_k;  c <- c + sum_k e_k (asynchronous: c + e_k, one worker at a time)

    With delta = 0 it is easgd. The centre c is what is evaluated and saved. Synchronous, a lost worker ends the run;
    asynchronous, the others go on, if the centre is not with it: on one host, or with servers.

    Reference: S. Zhang, A. Choromanska, Y. LeCun, Deep learning with elastic averaging SGD, 2015, arXiv:1412.6651
    Loops: strategies/elastic.py Elastic.step; strategies/elastic.py Elastic.gradient;
        topology/servers/shard.py Shard.exchange

    Args:
        lr: eta, the learning rate of a worker's own steps; with much momentum it must be small.
        momentum: delta, what remains of a worker's last move.
        center_rate: beta, how fast the centre follows the workers.
        moving_rate: alpha, how strongly a worker is pulled to the centre; beta / P if not given.
        period: tau, steps between two elastic moves.
        asynchronous: every worker meets the centre on its own clock.
        rule: how a worker applies its own gradient, instead of SGD with lr.
        shard: how the centre is cut over servers when asynchronous.
    """
    return Elastic(rule or Sgd(lr), center_rate, moving_rate, period, asynchronous, shard, momentum)


def adaptive_batch(lr: float = 0.3, factor: int = 2, most: int = 4, rule: Rule | None = None) -> GrowingBatch:
    """Adaptive mini-batch size: where others would lower the learning rate, the mini-batch grows.

    split: data. when: bulk, after so many mini-batches as make up a large one. who: a collective. what: raw. how: any
    rule, the same on every worker.

        at 0.3, 0.6 and 0.8 of the run:  B <- f B, as long as it is at most `most` times the first one
                                         then eta <- eta / f instead

    Both make the noise eta N / (B (1 - mu)) smaller by the same factor, but larger mini-batches mean fewer updates and
    fewer messages. A step takes as long as the slowest worker; a lost worker ends the run.

    Reference: S. Smith, P. Kindermans, C. Ying, Q. Le, Don't decay the learning rate, increase the batch size, 2017,
        arXiv:1711.00489
    Loops: strategies/growing_batch.py GrowingBatch.step; strategies/growing_batch.py GrowingBatch.phase;
        strategies/growing_batch.py GrowingBatch.update

    Args:
        lr: eta, the learning rate.
        factor: f, by how much a mini-batch grows at each milestone.
        most: how many times the first mini-batch it may be.
        rule: how the mean gradient is applied, instead of SGD with lr.
    """
    return GrowingBatch(rule or Sgd(lr), factor, most=most)
