"""Batch methods: few steps on large batches, each computed by all workers together."""

from __future__ import annotations

from manyhands.strategies.sandblaster import Sandblaster

__all__ = ["sandblaster"]


def sandblaster(
    lr: float = 1.0,
    history: int = 10,
    portion: int = 32,
    batches: int = 4,
    iterations: int = 3,
) -> Sandblaster:
    """Sandblaster L-BFGS: a coordinator assigns small portions of a large batch to idle workers.

    split: data, in portions. when: every batch, in lock step. who: a coordinator, and servers of all vectors. what: raw
    gradients; samples of a portion that another worker computes. how: L-BFGS with a line search.

        replicas: g = sum of the gradients of all portions at w, in their order, over the number of samples
        servers:  d = -H g by dot products over all spans;  t by the strong conditions of Wolfe;  w <- w + t d
                  s = t d,  y = g(w + t d) - g(w) on the same batch, kept if s'y > 0

    No rank has a whole vector except the weights it computes gradients at. A portion that takes too long is assigned to
    a second replica, and the later of the two results is dropped, so a slow worker does not delay the batch. The run
    continues without a lost worker, if no vectors are lost with it: on one host, or with servers; its portions are
    assigned to others. Otherwise the run ends. It also ends without the first worker, which is the coordinator.

    Reference: J. Dean et al., Large scale distributed deep networks, 2012
    Loops: strategies/sandblaster/sandblaster.py Sandblaster.step;
        strategies/sandblaster/sandblaster.py Sandblaster._compute;
        strategies/sandblaster/coordinator.py Coordinator.run;
        strategies/sandblaster/coordinator.py Coordinator._iterate;
        strategies/sandblaster/coordinator.py Coordinator._evaluate;
        strategies/sandblaster/vector_server.py VectorServer.serve; strategies/sandblaster/portions.py Portions.take;
        rules/lbfgs.py direction; rules/wolfe.py strong_wolfe

    Args:
        lr: the first step length of a line search; at the very first one lr min(1, 1/|g|_1).
        history: m, how many pairs (s, y) are kept; with 0 it is steepest descent.
        portion: samples per portion; much less than a worker's share of a batch, so that the load can be balanced.
        batches: mini-batches of every worker that form one batch.
        iterations: steps of L-BFGS on one batch.
    """
    return Sandblaster(lr, history, portion, batches, iterations)
