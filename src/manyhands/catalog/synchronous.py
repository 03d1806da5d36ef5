"""Synchronous methods: all workers take every step together."""

from __future__ import annotations

from typing import Literal

from manyhands.codecs import Raw
from manyhands.consistency import Bulk
from manyhands.core.errors import refuse_unless
from manyhands.core.protocols import Codec, Rule
from manyhands.rules import Sgd
from manyhands.strategies.allreduce import AllReduce
from manyhands.strategies.compressed import Compressed, Encoded
from manyhands.strategies.elastic import Elastic
from manyhands.strategies.growing_batch import GrowingBatch
from manyhands.strategies.hybrid import Hybrid
from manyhands.strategies.server import Server

__all__ = ["adaptive_batch", "bsp", "bsp_server", "eamsgd", "easgd", "hierarchical_server", "hybrid"]


def bsp(
    lr: float = 0.3,
    rule: Rule | None = None,
    collective: str = "auto",
    codec: Codec | None = None,
    exchange: Literal["gather", "stripes", "sparcml"] = "gather",
    by_host: bool = False,
) -> AllReduce | Compressed:
    """Bulk-synchronous SGD: the gradients of all workers are averaged before every step.

    split: data. when: bulk. who: a collective. what: raw, or any codec. how: any rule, the same on every worker.

        g = (1/P) sum_k g_k(w; B_k)
        w <- w - eta g

    It is SGD with a mini-batch P times as large. A step takes as long as the slowest worker; a lost worker
    ends the run.

    Reference: L. Valiant, A bridging model for parallel computation, 1990
    Loops: strategies/allreduce.py AllReduce.step; strategies/compressed.py Compressed.step

    Args:
        lr: eta, the learning rate.
        rule: how the mean gradient is applied, instead of SGD with lr.
        collective: how gradients are summed: auto, native, shared, ring, tree, butterfly or rabenseifner.
        codec: what a gradient looks like on the wire, such as half() or feedback(topk(0.01)); raw if not given.
        exchange: with a codec, who is told what: everyone everything (gather), owners of stripes (stripes), or
            partners, who merge sparse vectors (sparcml).
        by_host: with a codec, whether those of one host first add up what they have, as it is, and then come as one.
    """
    if codec is None:
        refuse_unless(exchange == "gather", "exchange", exchange, "gather without a codec: a collective sums")
        refuse_unless(not by_host, "by_host", by_host, "False without a codec: a collective sums")
        return AllReduce(rule or Sgd(lr), collective)
    refuse_unless(collective == "auto", "collective", collective, "auto with a codec: it is about raw numbers")
    return Compressed(rule or Sgd(lr), Encoded(codec, exchange, by_host))


def bsp_server(
    lr: float = 0.3,
    rule: Rule | None = None,
    codec: Codec | None = None,
    shard: Literal["size", "layer", "round-robin"] = "size",
    groups: int = 0,
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
        shard: whether servers keep equal stretches of weights (size) or whole layers (layer, or in turn: round-robin).
        groups: how many groups of workers come to the shards as one each, as in hierarchical-server; 0: none.
        replicas: how many servers keep each shard; with 2 a lost server is not missed.
    """
    return Server(Bulk(), rule or Sgd(lr), codec or Raw(), shard, groups=groups, copies=replicas)


def hierarchical_server(
    groups: int = 2,
    lr: float = 0.3,
    rule: Rule | None = None,
    codec: Codec | None = None,
    shard: Literal["size", "layer", "round-robin"] = "size",
) -> Server:
    """Hierarchical parameter servers: gradients are summed on their way up a tree, weights go down the same way.

    split: data. when: bulk. who: parameter-server shards, and a relay per group of workers. what: any codec from
    workers to relays, raw sums above. how: any rule, at the shard.

        worker k: pull w from its relay;  g_k = gradient(w; B_k);  push g_k to its relay
        relay:    when all of its group are there: push s = sum_k g_k and n, how many they are
        shard:    when all groups are there: w <- w - eta (sum of s) / (sum of n), summed in the order of groups

    The result is that of bsp-server but for the order of the sum, whatever the sizes of the groups, since sums and
    counts are carried; a mean of means would not do. A shard gets a message per group instead of one per worker, and
    answers as many. The relay of a group is with its first worker. Other methods with servers go through such a tree
    with their knob groups: a group then counts as one worker, which is in step inside (ssp, softsync), or whose
    gradients are summed while the last sum is on its way (downpour). A lost worker ends the run; in other methods
    with groups only one that has a relay or a shard does.

    Reference: S. Gupta, W. Zhang, F. Wang, Model accuracy and runtime tradeoff in distributed deep learning: a
        systematic study, 2016, arXiv:1509.04210 (Rudra-adv)
    Loops: strategies/server.py Server.step; topology/servers/relay.py Relay.serve;
        topology/servers/relay.py Branch.advance; topology/servers/messages.py Keeper.serve;
        topology/servers/shard.py Shard.push; consistency/bulk.py Bulk

    Args:
        groups: how many groups of neighbours the workers form, as even as can be; if as many, it is bsp-server.
        lr: eta, the learning rate.
        rule: how the mean gradient is applied, instead of SGD with lr.
        codec: what a push of a worker looks like on the wire, such as half() or feedback(topk(0.01)); raw if not given.
        shard: whether servers keep equal stretches of weights (size) or whole layers (layer, or in turn: round-robin).
    """
    refuse_unless(groups >= 2, "groups", groups, ">= 2")
    return Server(Bulk(), rule or Sgd(lr), codec or Raw(), shard, groups=groups)


def easgd(
    lr: float = 0.2,
    center_rate: float = 0.9,
    moving_rate: float | None = None,
    period: int = 1,
    asynchronous: bool = False,
    rule: Rule | None = None,
    shard: Literal["size", "layer", "round-robin"] = "size",
    codec: Codec | None = None,
) -> Elastic:
    """Elastic averaging SGD: workers explore on their own, tied to a common centre by a spring.

    split: data. when: every period steps, together or each on its own clock. who: a collective, or shards
    of the centre when asynchronous. what: any codec without a memory; asynchronous, any that only rounds. how: the
    elastic move beside any local rule.

        e_k = alpha (x_k - c)
        x_k <- x_k - eta g_k(x_k) - e_k        the gradient is taken before the elastic move
        c   <- c + sum_k e_k                   asynchronous: c <- c + e_k, one worker at a time

    Asynchronous, with a codec x_k is encoded on its way to the centre and e_k on its way back, and both sides move by
    what e_k has become: what the centre gains the worker loses. Synchronous, x_k - c is encoded, to the same end. The
    centre c is what is evaluated and saved. Synchronous, a lost worker ends the run; asynchronous, the others go on, if
    the centre is not with it: on one host, or with servers.

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
        codec: what x - c looks like on the wire, such as topk(0.1); asynchronous x and e, such as half(). Raw if not
            given.
    """
    return Elastic(rule or Sgd(lr), center_rate, moving_rate, period, asynchronous, shard, codec=codec or Raw())


def eamsgd(
    lr: float = 0.03,
    momentum: float = 0.9,
    center_rate: float = 0.9,
    moving_rate: float | None = None,
    period: int = 1,
    asynchronous: bool = False,
    rule: Rule | None = None,
    shard: Literal["size", "layer", "round-robin"] = "size",
    codec: Codec | None = None,
) -> Elastic:
    """Elastic averaging with momentum: like easgd, but a worker's own moves have inertia; the spring has none.

    split: data. when: every period steps, together or each on its own clock. who: a collective, or shards
    of the centre when asynchronous. what: any codec without a memory; asynchronous, any that only rounds. how: the
    elastic move beside Nesterov momentum on any local rule.

        e_k = alpha (x_k - c)
        v_k <- delta v_k - eta g_k(x_k + delta v_k)
        x_k <- x_k + v_k - e_k;  c <- c + sum_k e_k (asynchronous: c + e_k, one worker at a time)

    With delta = 0 it is easgd; a codec does what it does there. The centre c is what is evaluated and saved.
    Synchronous, a lost worker ends the run; asynchronous, the others go on, if the centre is not with it: on one host,
    or with servers.

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
        codec: what x - c looks like on the wire, such as topk(0.1); asynchronous x and e, such as half(). Raw if not
            given.
    """
    return Elastic(rule or Sgd(lr), center_rate, moving_rate, period, asynchronous, shard, momentum, codec or Raw())


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


def hybrid(
    lr: float = 0.3,
    threshold: float = 0.5,
    rule: Rule | None = None,
    sparse_rule: Rule | None = None,
    collective: str = "auto",
) -> Hybrid:
    """Hybrid of all-reduce and servers: a collective for dense gradients, shards for the rows of sparse embeddings.

    split: data. when: bulk. who: a collective; for embeddings with sparse gradients shards of rows, at the servers or
    at all workers. what: raw, and of a table only the rows that a mini-batch reads or touches. how: any rule; for rows
    one that moves nothing without a gradient.

        dense:  g = (1/P) sum_k g_k;  w <- w - eta g
        table:  worker: pull the rows r that B_k reads;  push (r, g_k,r) of those it touches
                shard:  when all P have pushed: w_r <- w_r - eta (1/P) sum_k g_k,r for every row r that somebody touched
        alpha:  the fraction of rows that a mini-batch touches, in the first step; a table with a mean alpha of
                `threshold` or more is dense from then on

    With plain SGD the result is that of bsp. Of a table of W bytes 4 alpha W (N - 1) / N go in and out of each of N
    machines, and the numbers of rows, instead of 4 W (N - 1) / N. An embedding is sparse if it was made with
    sparse=True; its weights must be read by calling it, since a worker has no other rows up to date. Rules with a
    memory that fades (momentum, Adam) are refused for tables, and so is a norm to clip, which would need both halves.
    A lost worker ends the run.

    Reference: S. Kim et al., Parallax: sparsity-aware data parallel training of deep neural networks, 2018,
        arXiv:1808.02621
    Loops: strategies/hybrid.py Hybrid.step; strategies/hybrid.py Hybrid.measure;
        topology/tables/keeper.py Keeper.serve; topology/tables/spread.py Spread.pull;
        topology/tables/spread.py Spread.push; strategies/allreduce.py AllReduce.step

    Args:
        lr: eta, the learning rate.
        threshold: the fraction alpha of touched rows from which on a table is treated as dense; 0: all, above 1: none.
        rule: how the mean gradient is applied, instead of SGD with lr.
        sparse_rule: how that of a table is applied, such as adagrad(0.1), if not like all others.
        collective: how dense gradients are summed: auto, native, shared, ring, tree, butterfly or rabenseifner.
    """
    return Hybrid(rule or Sgd(lr), sparse_rule, threshold, collective)
