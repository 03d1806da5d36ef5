"""Decentralised methods: there is no centre, and each worker talks to a few others."""

from __future__ import annotations

from typing import Literal

from manyhands.core.protocols import Codec, Rule
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
    """Decentralised SGD: in lock step each worker mixes its weights with those of its neighbours.

    split: data. when: every step, in lock step. who: the neighbours in a peer graph. what: raw, or any codec
    that only rounds. how: any rule, on the worker's own weights.

        x_i <- sum_j W_ij x_j - eta g_i(x_i)         the gradient is taken before mixing, so both go on at once
        W_ij = 1 / (1 + max(d_i, d_j)), d: number of neighbours; W_ii = 1 - sum_j W_ij
        ring 1/3, torus 1/5, complete 1/P, exponential: all equal

    W is symmetric and doubly stochastic, so the mean of all x, which is what is evaluated and saved, moves by the
    mean of the gradients. A slow worker holds up its neighbours, and step by step all others. A lost worker holds up
    nobody: its weight goes to the diagonal and the others take all their steps. Its data is not seen any more, and
    workers that only it connected train apart from then on; the answer is still the mean of all that are left.

    Reference: X. Lian et al., Can decentralized algorithms outperform centralized algorithms? A case study for
    decentralized parallel stochastic gradient descent, 2017, arXiv:1705.09056
    Loops: strategies/mixing.py Mixing.step; strategies/mixing.py Mixing.hear; topology/peers/mixing.py mixing

    Args:
        lr: eta, the learning rate.
        graph: who is whose neighbour; a random one, drawn from the seed, is two rings at once.
        mix: beside the step, as in the paper, or after it, x_i <- sum_j W_ij (x_j - eta g_j), as is published too.
        rule: how a worker applies its gradient, instead of SGD with lr.
        codec: what x looks like on the wire, such as half() or half("bf16"): one that only rounds; raw if not given.
    """
    return Mixing(rule or Sgd(lr), graph, mix, codec)


def gossip(
    lr: float = 0.3,
    mode: Literal["push", "pull", "pairwise"] = "pull",
    period: int = 1,
    rule: Rule | None = None,
    codec: Codec | None = None,
) -> Gossip:
    """Gossiping SGD: after its own step each worker averages with another one, chosen at random.

    split: data. when: every tau steps, never in lock step. who: anybody. what: raw, or any codec that only rounds.
    how: any rule, on the worker's own weights.

        x_i' = x_i - eta g_i(x_i);  every tau steps choose j among all others:
        pull:     x_i <- (x_i' + x_j) / 2, j is not changed
        push:     send x_i' to j, which at its next step averages itself with all that it has received since its last:
                  x_j <- (x_j' + sum received) / (1 + number received)
        pairwise: x_i, x_j <- (x_i' + x_j) / 2, atomically

    The mean of all x is what is evaluated and saved; pairwise averaging (S. Boyd et al., Randomized gossip algorithms,
    2006) keeps it, the others do on average over the choice. A peer answers also while it computes, so nobody waits
    for a slow one. A push that has not been read yet gives way to the next of the same sender. A lost worker is not
    chosen any more.

    Reference: P. Jin, Q. Yuan, F. Iandola, K. Keutzer, How to scale distributed deep learning?, 2016,
    arXiv:1611.04581
    Loops: strategies/gossip.py Gossip.step; strategies/gossip.py Gossip.communicate;
        topology/peers/exchanges.py Pulling; topology/peers/exchanges.py Pushing

    Args:
        lr: eta, the learning rate.
        mode: who changes: the one who asks (pull), the one who is sent to (push), or both (pairwise).
        period: tau, steps between two exchanges of a worker's own.
        rule: how a worker applies its gradient, instead of SGD with lr.
        codec: what x looks like on the wire, such as half() or half("bf16"): one that only rounds; raw if not given.
    """
    return Gossip(rule or Sgd(lr), mode, period, codec)
