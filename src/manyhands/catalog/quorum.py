"""Updates of some: a server does not wait for the gradients of all workers."""

from __future__ import annotations

from typing import Literal

from manyhands.codecs import Raw
from manyhands.consistency import Quorum
from manyhands.core.protocols import Codec, Rule
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
    """Synchronous SGD with backup workers: an update is made of the first gradients, the slowest workers are spared.

    split: data, and every worker may draw any sample. when: quorum(P - b, fresh). who: parameter-server shards.
    what: any codec. how: any rule, at the shard, on the mean of N = P - b gradients.

        worker: pull (w, t);  g = gradient(w);  push (g, t)
        shard:  drop g if t is not the version now;  at the N-th:  w <- w - eta (1/N) sum g;  t <- t + 1

    All that is applied was computed at the newest weights: as in bsp nothing is stale, but nobody waits for the b
    slowest. Whoever comes late has worked for nothing: it finishes its gradient, which is dropped, and reads again.
    Since some are dropped, no worker has samples that only it sees. A lost worker is one backup less; once there are
    fewer than N, all who are left. If the shards are its own (not on one host, and no servers), the run ends.

    Reference: J. Chen, X. Pan, R. Monga, S. Bengio, R. Jozefowicz, Revisiting distributed synchronous SGD, 2016,
        arXiv:1604.00981
    Loops: strategies/server.py Server.step; topology/servers/messages.py Keeper.serve;
        topology/servers/shard.py Shard.push; topology/servers/shard.py Shard.follow; consistency/quorum.py Quorum

    Args:
        backups: b, how many workers are not waited for; 0: it is bsp-server.
        lr: eta, the learning rate.
        distinct: whether the gradients of an update are of distinct workers; if not, a fast worker may bring several.
        rule: how the mean is applied, instead of SGD with lr.
        codec: what a push looks like on the wire; raw if not given. What was dropped stays in its memory.
        shard: whether servers keep equal stretches of weights (size) or whole layers (layer, or in turn: round-robin).
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
    """K-sync SGD: an update is made of the first k gradients at the newest weights; the others begin again.

    split: data, and every worker may draw any sample. when: quorum(k, fresh). who: parameter-server shards. what:
    any codec. how: any rule, at the shard, on the mean of k gradients.

        worker: pull (w, t);  g = gradient(w);  push (g, t)
        shard:  drop g if t is not the version now;  at the k-th:  w <- w - eta (1/k) sum g;  t <- t + 1

    The same as backup-workers with P - k of them. Where the paper cancels the slow workers, ours finish their
    gradient before they notice. A lost worker is not missed; once there are fewer than k, all who are left make an
    update. If the shards are its own (not on one host, and no servers), the run ends.

    Reference: S. Dutta et al., Slow and stale gradients can win the race: error-runtime trade-offs in distributed
        SGD, 2018
    Loops: strategies/server.py Server.step; topology/servers/messages.py Keeper.serve;
        topology/servers/shard.py Shard.push; topology/servers/shard.py Shard.follow; consistency/quorum.py Quorum

    Args:
        k: how many gradients make an update, if not given all but one; as many as there are workers: it is bsp-server.
        lr: eta, the learning rate.
        rule: how the mean is applied, instead of SGD with lr.
        codec: what a push looks like on the wire; raw if not given. What was dropped stays in its memory.
        shard: whether servers keep equal stretches of weights (size) or whole layers (layer, or in turn: round-robin).
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
    """K-async SGD: an update is made of the first k gradients of distinct workers, however old they are.

    split: data. when: quorum(k). who: parameter-server shards. what: any codec. how: any rule, at the shard, on the
    mean of k gradients.

        worker: pull w;  g = gradient(w);  push g;  wait until it has been applied
        shard:  at the k-th gradient:  w <- w - eta (1/k) sum g

    Nothing is thrown away: who is not among the first k goes on, and counts in a later update. With k = 1 it is
    asynchronous SGD, with k = P it is bsp-server. A lost worker is not missed; once there are fewer than k, all who
    are left make an update. If the shards are its own (not on one host, and no servers), the run ends.

    Reference: S. Dutta et al., Slow and stale gradients can win the race: error-runtime trade-offs in distributed
        SGD, 2018
    Loops: strategies/server.py Server.step; topology/servers/messages.py Keeper.serve;
        topology/servers/shard.py Shard.push; topology/servers/shard.py Shard.follow; consistency/quorum.py Quorum

    Args:
        k: how many gradients make an update; if not given, half as many as there are workers.
        lr: eta, the learning rate.
        rule: how the mean is applied, instead of SGD with lr.
        codec: what a push looks like on the wire; raw if not given.
        shard: whether servers keep equal stretches of weights (size) or whole layers (layer, or in turn: round-robin).
    """
    return Server(Quorum(k, parts=1 if k else 2), rule or Sgd(lr), codec or Raw(), shard)


def k_batch_async(
    k: int | None = None,
    lr: float = 0.15,
    rule: Rule | None = None,
    codec: Codec | None = None,
    shard: Literal["size", "layer", "round-robin"] = "size",
) -> Server:
    """K-batch-async SGD: an update is made of any k gradients, and nobody waits.

    split: data. when: quorum(k, of anyone). who: parameter-server shards. what: any codec. how: any rule, at the
    shard, on the mean of k gradients.

        worker: g = gradient(w);  push g;  pull w
        shard:  at the k-th gradient, whoever sent them:  w <- w - eta (1/k) sum g

    A fast worker may have several gradients in one update. With k = 1 it is asynchronous SGD. A lost worker is not
    missed; once there are fewer than k, so many gradients make an update. If the shards are its own (not on one host,
    and no servers), the run ends.

    Reference: S. Dutta et al., Slow and stale gradients can win the race: error-runtime trade-offs in distributed
        SGD, 2018
    Loops: strategies/server.py Server.step; topology/servers/messages.py Keeper.serve;
        topology/servers/shard.py Shard.push; consistency/quorum.py Quorum

    Args:
        k: how many gradients make an update; if not given, half as many as there are workers.
        lr: eta, the learning rate.
        rule: how the mean is applied, instead of SGD with lr.
        codec: what a push looks like on the wire; raw if not given.
        shard: whether servers keep equal stretches of weights (size) or whole layers (layer, or in turn: round-robin).
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
    """n-softsync: an update is made of any P/n gradients, each divided by its staleness; nobody waits.

    split: data. when: quorum(P // n, of anyone). who: parameter-server shards. what: any codec. how: any rule, at the
    shard, on the mean of c = P // n gradients, each divided by max(1, tau).

        worker: g = gradient(w);  push g;  pull w
        shard:  at the c-th gradient, whoever sent them:  w <- w - (eta/c) sum g_l / max(1, tau_l)

    tau counts updates, not pushes, so it is about n. With n = 1 it has the updates of bsp without its barrier: a fast
    worker may bring two gradients and a slow one none. With n = P it is asynchronous SGD. A lost worker is not missed;
    once there are fewer than c, so many gradients make an update. If the shards are its own (not on one host, and no
    servers), the run ends.

    Reference: S. Gupta, W. Zhang, F. Wang, Model accuracy and runtime tradeoff in distributed deep learning: a
        systematic study, 2016, arXiv:1509.04210
    Loops: strategies/server.py Server.step; topology/servers/messages.py Keeper.serve;
        topology/servers/shard.py Shard.push; consistency/quorum.py Quorum; rules/delay.py StalenessAware

    Args:
        splitting: n, how many updates share the gradients that all workers bring in one step each.
        lr: eta, the learning rate.
        modulated: divide each gradient by its staleness; if not, it is k-batch-async.
        rule: how the mean is applied, instead of SGD with lr.
        codec: what a push looks like on the wire; raw if not given.
        shard: whether servers keep equal stretches of weights (size) or whole layers (layer, or in turn: round-robin).
        groups: how many groups of workers come to the shards as one each, as in hierarchical-server; 0: none.
    """
    step = rule or Sgd(lr)
    when = Quorum(parts=splitting, distinct=False)
    how = chain(StalenessAware(), step) if modulated else step
    return Server(when, how, codec or Raw(), shard, prefetch=True, groups=groups)
