"""Synchronous methods: all workers take every step together."""

from __future__ import annotations

from typing import Literal

from manyhands.codecs import Raw
from manyhands.consistency import Bulk
from manyhands.core.codec import Codec
from manyhands.core.errors import refuse_unless
from manyhands.core.rule import Rule
from manyhands.rules import Sgd
from manyhands.strategies.allreduce import AllReduce
from manyhands.strategies.compressed import Compressed, Encoded
from manyhands.strategies.elastic import Elastic
from manyhands.strategies.fully_sharded import FullySharded
from manyhands.strategies.growing_batch import GrowingBatch
from manyhands.strategies.hybrid import Hybrid
from manyhands.strategies.server import Server

__all__ = ["adaptive_batch", "bsp", "bsp_server", "eamsgd", "easgd", "fully_sharded", "hierarchical_server", "hybrid"]


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
        codec: how a gradient is encoded, such as half() or feedback(topk(0.01)); raw if not given.
        exchange: with a codec, how encoded gradients are summed: all-gathered (gather), reduced by owners of stripes
            (stripes), or merged in pairs as sparse vectors (sparcml).
        by_host: with a codec, whether the workers of one host first sum their raw gradients and then take part as one.
    """
    if codec is None:
        refuse_unless(exchange == "gather", "exchange", exchange, "gather without a codec")
        refuse_unless(not by_host, "by_host", by_host, "False without a codec")
        return AllReduce(rule or Sgd(lr), collective)
    refuse_unless(collective == "auto", "collective", collective, "auto with a codec: it is for raw gradients")
    return Compressed(rule or Sgd(lr), Encoded(codec, exchange, by_host))


def fully_sharded(lr: float = 0.3, rule: Rule | None = None, keep: bool = False, unit: int = 2**16) -> FullySharded:
    """Fully sharded SGD: each worker keeps 1/P of the weights, and gathers those of a module while it runs.

    split: data, and the weights in storage. when: bulk. who: a collective. what: raw. how: any elementwise rule, each
    worker on its own shard.

        before module l runs, forward and backward:  W_l <- all-gather of the shards w_lk
        when its gradient is there:                  g_lk <- span k of sum_j g_lj(W; B_j), by reduce-scatter; free W_l
        at the end of a step:                        w_lk <- w_lk - (eta / P) g_lk

    The result is that of bsp, and a worker stores 1/P of the weights, gradients and optimizer state, and the weights of
    one module. It sends up to 3 m (P - 1) / P numbers in a step, bsp 2 m (P - 1) / P; with `keep` both send the same.
    Any model, tied weights too; every worker must run the same modules in the same order. A lost worker ends the run.

    Where we differ: the last weights of the forward pass are not gathered again; the next ones are not gathered ahead.

    Reference: S. Rajbhandari et al., ZeRO: Memory optimizations toward training trillion parameter models, 2020,
        arXiv:1910.02054
    Loops: strategies/fully_sharded/fully_sharded.py FullySharded.step; strategies/fully_sharded/passes.py
        ShardedPasses.gradient

    Args:
        lr: eta, the learning rate.
        rule: how the mean gradient is applied, instead of SGD with lr; elementwise.
        keep: whether weights stay gathered between the forward and the backward pass.
        unit: neighbouring modules are gathered together until they have so many parameters, because small messages
            cost more than memory.
    """
    return FullySharded(rule or Sgd(lr), keep, unit)


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
    Loops: strategies/server.py Server.step; servers/shard_server.py ShardServer.serve; servers/shard.py Shard.push;
        consistency/bulk.py Bulk

    Args:
        lr: eta, the learning rate.
        rule: how the mean gradient is applied, instead of SGD with lr.
        codec: how a push is encoded, such as half() or feedback(topk(0.01)); raw if not given.
        shard: how weights are divided among servers: into spans of equal size (size), or by whole layers, balanced
            (layer) or in turn (round-robin).
        groups: number of groups of workers, each with an aggregator as in hierarchical-server; 0: none.
        replicas: servers per shard; with 2 the run continues without a lost server.
    """
    return Server(Bulk(), rule or Sgd(lr), codec or Raw(), shard, groups=groups, copies=replicas)


def hierarchical_server(
    groups: int = 2,
    lr: float = 0.3,
    rule: Rule | None = None,
    codec: Codec | None = None,
    shard: Literal["size", "layer", "round-robin"] = "size",
) -> Server:
    """Hierarchical parameter servers: gradients are summed along a tree of aggregators, weights return the same way.

    split: data. when: bulk. who: parameter-server shards, and an aggregator per group of workers. what: any codec from
    workers to aggregators, raw sums above. how: any rule, at the shard.

        worker k:   pull w from its aggregator;  g_k = gradient(w; B_k);  push g_k to its aggregator
        aggregator: when all gradients of its group are there: push s = sum_k g_k and their number n
        shard:      when all groups are there: w <- w - eta (sum of s) / (sum of n), summed in the order of groups

    The result is that of bsp-server except for the order of summation, whatever the sizes of the groups, because sums
    and counts are sent; a mean of means would be different. A shard receives one message per group instead of one per
    worker, and sends as many answers. The aggregator of a group runs in its first worker. Other methods with servers
    use such a tree through their knob groups: a group then counts as one worker, whose members are in lock step (ssp,
    softsync), or whose gradients are summed until the previous sum has been answered (downpour). A lost worker ends the
    run; in other methods with groups only the loss of a worker with an aggregator or a shard does.

    Reference: S. Gupta, W. Zhang, F. Wang, Model accuracy and runtime tradeoff in distributed deep learning: a
        systematic study, 2016, arXiv:1509.04210 (Rudra-adv)
    Loops: strategies/server.py Server.step; servers/aggregation.py Aggregator.serve;
        servers/aggregation.py AggregatorUplink.advance; servers/shard_server.py ShardServer.serve;
        servers/shard.py Shard.push; consistency/bulk.py Bulk

    Args:
        groups: number of groups of workers, of equal size if possible; with one group per worker it is bsp-server.
        lr: eta, the learning rate.
        rule: how the mean gradient is applied, instead of SGD with lr.
        codec: how the push of a worker is encoded, such as half() or feedback(topk(0.01)); raw if not given.
        shard: how weights are divided among servers: into spans of equal size (size), or by whole layers, balanced
            (layer) or in turn (round-robin).
    """
    refuse_unless(groups >= 2, "groups", groups, ">= 2")
    return Server(Bulk(), rule or Sgd(lr), codec or Raw(), shard, groups=groups)


def easgd(
    lr: float = 0.2,
    center_rate: float | None = None,
    moving_rate: float | None = None,
    period: int = 1,
    asynchronous: bool = False,
    rule: Rule | None = None,
    shard: Literal["size", "layer", "round-robin"] = "size",
    codec: Codec | None = None,
) -> Elastic:
    """Elastic averaging SGD: workers train on their own weights, pulled towards a common centre by an elastic force.

    split: data. when: every period steps, together or each on its own clock. who: a collective, or shards
    of the centre when asynchronous. what: any codec without a memory; asynchronous, any that only rounds. how: the
    elastic move beside any local rule.

        e_k = alpha (x_k - c)
        x_k <- x_k - eta g_k(x_k) - e_k        the gradient is taken before the elastic move
        c   <- c + sum_k e_k                   asynchronous: c <- c + e_k, one worker at a time

    With P workers and beta = P alpha, synchronous c <- (1 - beta) c + (beta / P) sum_k x_k. Give alpha or beta, and the
    other follows; both are refused unless they agree.

    Asynchronous, with a codec x_k is encoded when sent to the centre and e_k when sent back, and both sides move by the
    decoded e_k: what is added to the centre is subtracted from the worker. Synchronous, x_k - c is encoded, to the same
    effect. The centre c is evaluated and saved. Synchronous, a lost worker ends the run; asynchronous, the run
    continues without it, if no part of the centre is lost with it: on one host, or with servers.

    Reference: S. Zhang, A. Choromanska, Y. LeCun, Deep learning with elastic averaging SGD, 2015, arXiv:1412.6651
    Loops: strategies/elastic.py Elastic.step; servers/shard.py Shard.exchange

    Args:
        lr: eta, the learning rate of a worker's own steps.
        center_rate: beta = P alpha, how fast the centre follows the workers; 0.9 if neither rate is given.
        moving_rate: alpha, the strength of the elastic force; beta / P if not given. Synchronous, at most 1 / P.
        period: tau, steps between two elastic moves.
        asynchronous: every worker exchanges with the centre on its own clock.
        rule: how a worker applies its own gradient, instead of SGD with lr.
        shard: how the centre is divided among servers when asynchronous.
        codec: how x - c is encoded, such as topk(0.1); when asynchronous how x and e are, such as half(). Raw if not
            given.
    """
    return Elastic(rule or Sgd(lr), center_rate, moving_rate, period, asynchronous, shard, codec=codec or Raw())


def eamsgd(
    lr: float = 0.03,
    momentum: float = 0.9,
    center_rate: float | None = None,
    moving_rate: float | None = None,
    period: int = 1,
    asynchronous: bool = False,
    rule: Rule | None = None,
    shard: Literal["size", "layer", "round-robin"] = "size",
    codec: Codec | None = None,
) -> Elastic:
    """Elastic averaging with momentum: easgd with Nesterov momentum on the workers' own steps.

    split: data. when: every period steps, together or each on its own clock. who: a collective, or shards
    of the centre when asynchronous. what: any codec without a memory; asynchronous, any that only rounds. how: the
    elastic move beside Nesterov momentum on any local rule.

        e_k = alpha (x_k - c)
        v_k <- delta v_k - eta g_k(x_k + delta v_k)
        x_k <- x_k + v_k - e_k;  c <- c + sum_k e_k (asynchronous: c + e_k, one worker at a time)

    As in easgd, alpha or beta = P alpha is given. With delta = 0 it is easgd; a codec works as there. The centre c is
    evaluated and saved. Synchronous, a lost worker ends the run; asynchronous, the run continues without it, if no part
    of the centre is lost with it: on one host, or with servers.

    Reference: S. Zhang, A. Choromanska, Y. LeCun, Deep learning with elastic averaging SGD, 2015, arXiv:1412.6651
    Loops: strategies/elastic.py Elastic.step; strategies/elastic.py Elastic._gradient; servers/shard.py Shard.exchange

    Args:
        lr: eta, the learning rate of a worker's own steps; it must be small if the momentum is large.
        momentum: delta, the momentum of a worker's own steps.
        center_rate: beta = P alpha, how fast the centre follows the workers; 0.9 if neither rate is given.
        moving_rate: alpha, the strength of the elastic force; beta / P if not given. Synchronous, at most 1 / P.
        period: tau, steps between two elastic moves.
        asynchronous: every worker exchanges with the centre on its own clock.
        rule: how a worker applies its own gradient, instead of SGD with lr.
        shard: how the centre is divided among servers when asynchronous.
        codec: how x - c is encoded, such as topk(0.1); when asynchronous how x and e are, such as half(). Raw if not
            given.
    """
    return Elastic(rule or Sgd(lr), center_rate, moving_rate, period, asynchronous, shard, momentum, codec or Raw())


def adaptive_batch(lr: float = 0.3, factor: int = 2, most: int = 4, rule: Rule | None = None) -> GrowingBatch:
    """Adaptive mini-batch size: the mini-batch grows at points where the learning rate would be lowered.

    split: data. when: bulk, after as many mini-batches as form a large one. who: a collective. what: raw. how: any
    rule, the same on every worker.

        at 0.3, 0.6 and 0.8 of the run:  B <- f B, as long as it is at most `most` times the first one
                                         then eta <- eta / f instead

    Both reduce the noise eta N / (B (1 - mu)) by the same factor, but larger mini-batches mean fewer updates and fewer
    messages. A step takes as long as the slowest worker; a lost worker ends the run.

    Reference: S. Smith, P. Kindermans, C. Ying, Q. Le, Don't decay the learning rate, increase the batch size, 2017,
        arXiv:1711.00489
    Loops: strategies/growing_batch.py GrowingBatch.step; strategies/growing_batch.py GrowingBatch._phase;
        strategies/growing_batch.py GrowingBatch._update

    Args:
        lr: eta, the learning rate.
        factor: f, the factor by which a mini-batch grows at each milestone.
        most: the largest mini-batch, in multiples of the first one.
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
    """Hybrid of all-reduce and servers: dense gradients are all-reduced, rows of sparse embeddings are kept by shards.

    split: data. when: bulk. who: a collective; for embeddings with sparse gradients shards of rows, at the servers or
    at all workers. what: raw, and of an embedding only the rows that a mini-batch reads or touches. how: any rule; for
    rows one that moves nothing without a gradient.

        dense:  g = (1/P) sum_k g_k;  w <- w - eta g
        table:  worker: pull the rows r that B_k reads;  push (r, g_k,r) of those it touches
                shard:  when all P have pushed: w_r <- w_r - eta (1/P) sum_k g_k,r for every row r that was touched
        alpha:  the fraction of rows that a mini-batch touches, in the first step; a table with a mean alpha of
                `threshold` or more is dense from then on

    With plain SGD the result is that of bsp. Of a table of W bytes 4 alpha W (N - 1) / N go in and out of each of N
    machines, and the row numbers, instead of 4 W (N - 1) / N. An embedding is sparse if it was made with sparse=True;
    its weights must be read by calling it, because only the rows of the current mini-batch are up to date on a worker.
    Rules with state that decays (momentum, Adam) are refused for tables, and so is clipping by norm, which would need
    both parts. A lost worker ends the run.

    Reference: S. Kim et al., Parallax: sparsity-aware data parallel training of deep neural networks, 2018,
        arXiv:1808.02621
    Loops: strategies/hybrid.py Hybrid.step; strategies/hybrid.py Hybrid._measure;
        servers/embeddings/server.py EmbeddingServer.serve; servers/embeddings/client.py EmbeddingClient.pull;
        servers/embeddings/client.py EmbeddingClient.push; strategies/allreduce.py AllReduce.step

    Args:
        lr: eta, the learning rate.
        threshold: the fraction alpha of touched rows from which a table is treated as dense; 0: all tables, above 1:
            none.
        rule: how the mean gradient is applied, instead of SGD with lr.
        sparse_rule: how the gradient of a table is applied, such as adagrad(0.1); as all others if not given.
        collective: how dense gradients are summed: auto, native, shared, ring, tree, butterfly or rabenseifner.
    """
    return Hybrid(rule or Sgd(lr), sparse_rule, threshold, collective)
