"""Decentralised methods: there is no server, and each worker communicates with a few others."""

from __future__ import annotations

from typing import Literal

from manyhands.core.codec import Codec
from manyhands.core.rule import Rule
from manyhands.rules import Sgd
from manyhands.strategies.gossip import Gossip
from manyhands.strategies.mixing import Mixing

__all__ = ["d_psgd", "gossip"]


def d_psgd(
    lr: float = 0.2,
    graph: Literal["ring", "complete", "exponential", "torus", "random"] = "ring",
    mix: Literal["beside", "after"] = "beside",
    rule: Rule | None = None,
    codec: Codec | None = None,
) -> Mixing:
    """Decentralised SGD: in lock step each worker averages its weights with those of its neighbours.

    split: data. when: every step, in lock step. who: the neighbours in a peer graph. what: raw, or any codec
    that only rounds. how: any rule, on the worker's own weights.

        x_i <- sum_j W_ij x_j - eta g_i(x_i)         the gradient is taken before mixing, so both run concurrently
        W_ij = 1 / (1 + max(d_i, d_j)), d: number of neighbours; W_ii = 1 - sum_j W_ij
        ring 1/3, torus 1/5, complete 1/P, exponential: all equal

    W is symmetric and doubly stochastic, so the mean of all x, which is evaluated and saved, moves by the mean of the
    gradients. A slow worker delays its neighbours and, step by step, all others. The run continues without a lost
    worker: its mixing weight moves to the diagonal, and the others take all their steps. Its data is no longer used,
    and workers that were connected only through it train separately from then on; the result is still the mean of all
    that are left.

    Reference: X. Lian et al., Can decentralized algorithms outperform centralized algorithms? A case study for
    decentralized parallel stochastic gradient descent, 2017, arXiv:1705.09056
    Loops: strategies/mixing.py Mixing.step; strategies/mixing.py Mixing._receive; peers/mixing.py mixing

    Args:
        lr: eta, the learning rate.
        graph: the neighbours of each worker; a random graph is the union of two rings drawn from the seed.
        mix: beside the step, as in the paper, or after it, x_i <- sum_j W_ij (x_j - eta g_j), which is published too.
        rule: how a worker applies its gradient, instead of SGD with lr.
        codec: how x is encoded, by a codec that only rounds, such as half() or half("bf16"); raw if not given.
    """
    return Mixing(rule or Sgd(lr), graph, mix, codec)


def gossip(
    lr: float = 0.3,
    mode: Literal["push", "pull", "pairwise"] = "pull",
    period: int = 1,
    rule: Rule | None = None,
    codec: Codec | None = None,
) -> Gossip:
    """Gossiping SGD: after its own step each worker averages its weights with those of a random other worker.

    split: data. when: every tau steps, never in lock step. who: any other worker. what: raw, or any codec that only
    rounds. how: any rule, on the worker's own weights.

        x_i' = x_i - eta g_i(x_i);  every tau steps choose j among all others:
        pull:     x_i <- (x_i' + x_j) / 2, j is not changed
        push:     send x_i' to j, which at its next step averages itself with all that it has received since its last:
                  x_j <- (x_j' + sum received) / (1 + number received)
        pairwise: x_i, x_j <- (x_i' + x_j) / 2, atomically

    The mean of all x is evaluated and saved; pairwise averaging (S. Boyd et al., Randomized gossip algorithms, 2006)
    preserves it, the other modes do in expectation. A worker answers requests while it computes, so no worker waits for
    a slow one. A push that has not been read yet is replaced by the next one of the same sender. The run continues
    without a lost worker, which is no longer chosen.

    Reference: P. Jin, Q. Yuan, F. Iandola, K. Keutzer, How to scale distributed deep learning?, 2016,
    arXiv:1611.04581
    Loops: strategies/gossip.py Gossip.step; peers/exchanges.py PeerLoop; peers/exchanges.py PullAverage;
        peers/exchanges.py PushAverage

    Args:
        lr: eta, the learning rate.
        mode: which of the two changes: the worker that asks (pull), the receiver (push), or both (pairwise).
        period: tau, steps between two exchanges that a worker initiates.
        rule: how a worker applies its gradient, instead of SGD with lr.
        codec: how x is encoded, by a codec that only rounds, such as half() or half("bf16"); raw if not given.
    """
    return Gossip(rule or Sgd(lr), mode, period, codec)
