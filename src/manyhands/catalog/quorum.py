"""Quorum methods: a server does not wait for the gradients of all workers."""

from __future__ import annotations

from typing import Literal

from manyhands.codecs import Raw
from manyhands.consistency import Quorum
from manyhands.core.codec import Codec
from manyhands.core.rule import Rule
from manyhands.rules import Sgd, StalenessAware, chain
from manyhands.strategies.server import Server

__all__ = ["backup_workers", "k_async", "k_batch_async", "k_sync", "softsync"]


def backup_workers(
    backups: int = 1,
    lr: float = 0.2,
    distinct: bool = True,
    rule: Rule | None = None,
    codec: Codec | None = None,
    shard: Literal["size", "layer", "round-robin"] = "size",
) -> Server:
    """Synchronous SGD with backup workers: a shard averages the first gradients and drops those of the slowest workers.

    split: data, and every worker may draw any sample. when: quorum(P - b, fresh). who: parameter-server shards.
    what: any codec. how: any rule, at the shard, on the mean of N = P - b gradients.

        worker: pull (w, t);  g = gradient(w);  push (g, t)
        shard:  drop g if t is not the current version;  at the N-th:  w <- w - eta (1/N) sum g;  t <- t + 1

    Every gradient that is applied was computed at the newest weights: as in bsp nothing is stale, but the update does
    not wait for the b slowest workers. A slow worker finishes its gradient, which is dropped, and pulls again. Since
    gradients are dropped, no worker has samples of its own. The run continues without a lost worker, with one backup
    less; with fewer than N workers left, an update takes the gradients of all of them. If a shard is lost with it
    (several hosts, and no servers), the run ends.

    Reference: J. Chen, X. Pan, R. Monga, S. Bengio, R. Jozefowicz, Revisiting distributed synchronous SGD, 2016,
        arXiv:1604.00981
    Loops: strategies/server.py Server.step; servers/shard_server.py ShardServer.serve; servers/shard.py Shard.push;
        servers/shard.py Shard.follow; consistency/quorum.py Quorum

    Args:
        backups: b, how many workers are not waited for; 0: it is bsp-server.
        lr: eta, the learning rate.
        distinct: whether the gradients of an update come from distinct workers; if not, a fast worker may contribute
            several.
        rule: how the mean is applied, instead of SGD with lr.
        codec: how a push is encoded; raw if not given. The error feedback of a codec keeps what was dropped.
        shard: how weights are divided among servers: into spans of equal size (size), or by whole layers, balanced
            (layer) or in turn (round-robin).
    """
    when = Quorum(spare=backups, fresh=True, distinct=distinct)
    return Server(when, rule or Sgd(lr), codec or Raw(), shard, draws_from_all=True)


def k_sync(
    k: int | None = None,
    lr: float = 0.2,
    rule: Rule | None = None,
    codec: Codec | None = None,
    shard: Literal["size", "layer", "round-robin"] = "size",
) -> Server:
    """K-sync SGD: a shard averages the first k gradients computed at the newest weights and drops the others.

    split: data, and every worker may draw any sample. when: quorum(k, fresh). who: parameter-server shards. what:
    any codec. how: any rule, at the shard, on the mean of k gradients.

        worker: pull (w, t);  g = gradient(w);  push (g, t)
        shard:  drop g if t is not the current version;  at the k-th:  w <- w - eta (1/k) sum g;  t <- t + 1

    The same as backup-workers with P - k of them. The paper cancels the slow workers; here they finish their gradient
    before it is dropped. The run continues without a lost worker; with fewer than k left, an update takes the gradients
    of all of them. If a shard is lost with it (several hosts, and no servers), the run ends.

    Reference: S. Dutta et al., Slow and stale gradients can win the race: error-runtime trade-offs in distributed
        SGD, 2018
    Loops: strategies/server.py Server.step; servers/shard_server.py ShardServer.serve; servers/shard.py Shard.push;
        servers/shard.py Shard.follow; consistency/quorum.py Quorum

    Args:
        k: how many gradients an update averages; all but one if not given. With as many as there are workers it is
            bsp-server.
        lr: eta, the learning rate.
        rule: how the mean is applied, instead of SGD with lr.
        codec: how a push is encoded; raw if not given. The error feedback of a codec keeps what was dropped.
        shard: how weights are divided among servers: into spans of equal size (size), or by whole layers, balanced
            (layer) or in turn (round-robin).
    """
    when = Quorum(k, spare=0 if k else 1, fresh=True)
    return Server(when, rule or Sgd(lr), codec or Raw(), shard, draws_from_all=True)


def k_async(
    k: int | None = None,
    lr: float = 0.15,
    rule: Rule | None = None,
    codec: Codec | None = None,
    shard: Literal["size", "layer", "round-robin"] = "size",
) -> Server:
    """K-async SGD: a shard averages the first k gradients of distinct workers, however stale they are.

    split: data. when: quorum(k). who: parameter-server shards. what: any codec. how: any rule, at the shard, on the
    mean of k gradients.

        worker: pull w;  g = gradient(w);  push g;  wait until it has been applied
        shard:  at the k-th gradient:  w <- w - eta (1/k) sum g

    No gradient is dropped: those that are not among the first k are part of a later update. With k = 1 it is
    asynchronous SGD, with k = P it is bsp-server. The run continues without a lost worker; with fewer than k left, an
    update takes the gradients of all of them. If a shard is lost with it (several hosts, and no servers), the run ends.

    Reference: S. Dutta et al., Slow and stale gradients can win the race: error-runtime trade-offs in distributed
        SGD, 2018
    Loops: strategies/server.py Server.step; servers/shard_server.py ShardServer.serve; servers/shard.py Shard.push;
        servers/shard.py Shard.follow; consistency/quorum.py Quorum

    Args:
        k: how many gradients an update averages; if not given, half as many as there are workers.
        lr: eta, the learning rate.
        rule: how the mean is applied, instead of SGD with lr.
        codec: how a push is encoded; raw if not given.
        shard: how weights are divided among servers: into spans of equal size (size), or by whole layers, balanced
            (layer) or in turn (round-robin).
    """
    return Server(Quorum(k, parts=1 if k else 2), rule or Sgd(lr), codec or Raw(), shard)


def k_batch_async(
    k: int | None = None,
    lr: float = 0.15,
    rule: Rule | None = None,
    codec: Codec | None = None,
    shard: Literal["size", "layer", "round-robin"] = "size",
) -> Server:
    """K-batch-async SGD: a shard averages any k gradients, and workers never wait.

    split: data. when: quorum(k, of any workers). who: parameter-server shards. what: any codec. how: any rule, at the
    shard, on the mean of k gradients.

        worker: g = gradient(w);  push g;  pull w
        shard:  at the k-th gradient, of any workers:  w <- w - eta (1/k) sum g

    A fast worker may contribute several gradients to one update. With k = 1 it is asynchronous SGD. The run continues
    without a lost worker; with fewer than k left, an update takes as many gradients as there are workers. If a shard is
    lost with it (several hosts, and no servers), the run ends.

    Reference: S. Dutta et al., Slow and stale gradients can win the race: error-runtime trade-offs in distributed
        SGD, 2018
    Loops: strategies/server.py Server.step; servers/shard_server.py ShardServer.serve; servers/shard.py Shard.push;
        consistency/quorum.py Quorum

    Args:
        k: how many gradients an update averages; if not given, half as many as there are workers.
        lr: eta, the learning rate.
        rule: how the mean is applied, instead of SGD with lr.
        codec: how a push is encoded; raw if not given.
        shard: how weights are divided among servers: into spans of equal size (size), or by whole layers, balanced
            (layer) or in turn (round-robin).
    """
    return Server(Quorum(k, parts=1 if k else 2, distinct=False), rule or Sgd(lr), codec or Raw(), shard, prefetch=True)


def softsync(
    splitting: int = 1,
    lr: float = 0.3,
    modulated: bool = True,
    rule: Rule | None = None,
    codec: Codec | None = None,
    shard: Literal["size", "layer", "round-robin"] = "size",
    groups: int = 0,
) -> Server:
    """n-softsync: a shard averages any P/n gradients, each divided by its staleness; workers never wait.

    split: data. when: quorum(P // n, of any workers). who: parameter-server shards. what: any codec. how: any rule, at
    the shard, on the mean of c = P // n gradients, each divided by max(1, tau).

        worker: g = gradient(w);  push g;  pull w
        shard:  at the c-th gradient, of any workers:  w <- w - (eta/c) sum g_l / max(1, tau_l)

    tau counts updates, not pushes, so it is about n. With n = 1 there are as many updates as in bsp, but no barrier: a
    fast worker may contribute two gradients and a slow one none. With n = P it is asynchronous SGD. The run continues
    without a lost worker; with fewer than c left, an update takes as many gradients as there are workers. If a shard is
    lost with it (several hosts, and no servers), the run ends.

    Reference: S. Gupta, W. Zhang, F. Wang, Model accuracy and runtime tradeoff in distributed deep learning: a
        systematic study, 2016, arXiv:1509.04210
    Loops: strategies/server.py Server.step; servers/shard_server.py ShardServer.serve; servers/shard.py Shard.push;
        consistency/quorum.py Quorum; rules/delay.py StalenessAware

    Args:
        splitting: n, into how many updates the gradients of one step of all workers are divided.
        lr: eta, the learning rate.
        modulated: divide each gradient by its staleness; if not, it is k-batch-async.
        rule: how the mean is applied, instead of SGD with lr.
        codec: how a push is encoded; raw if not given.
        shard: how weights are divided among servers: into spans of equal size (size), or by whole layers, balanced
            (layer) or in turn (round-robin).
        groups: number of groups of workers, each with an aggregator as in hierarchical-server; 0: none.
    """
    step = rule or Sgd(lr)
    when = Quorum(parts=splitting, distinct=False)
    how = chain(StalenessAware(), step) if modulated else step
    return Server(when, how, codec or Raw(), shard, prefetch=True, groups=groups)
