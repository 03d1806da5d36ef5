"""Batch methods: few steps on large batches, each of them computed by all."""

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
    """Sandblaster L-BFGS: a coordinator gives small portions of a large batch to whoever is free.

    split: data, in portions. when: every batch, in lock step. who: a coordinator, and keepers of all vectors. what:
    raw gradients; samples of a portion that somebody else computes. how: L-BFGS with a line search.

        replicas: g = sum of the gradients of all portions at w, in their order, over the number of samples
        keepers:  d = -H g by dots over all stretches;  t by the strong conditions of Wolfe;  w <- w + t d
                  s = t d,  y = g(w + t d) - g(w) on the same batch, kept if s'y > 0

    No rank has a whole vector but the weights it computes at. A portion that is late is given to another replica as
    well, and what comes second is dropped, so a slow worker holds nobody up. A lost worker is not missed, if no
    vectors are with it: on one host, or with servers; its portions go to others. Otherwise the run ends, and so it does
    without the first worker, the coordinator.

    Reference: J. Dean et al., Large scale distributed deep networks, 2012
    Loops: strategies/sandblaster.py Sandblaster.step; strategies/sandblaster.py Sandblaster.compute;
        strategies/coordinator.py Coordinator.run; strategies/coordinator.py Coordinator._iterate;
        strategies/coordinator.py Coordinator._evaluate; topology/keeping.py Keeper.serve;
        topology/portions.py Portions.take; rules/lbfgs.py direction; rules/wolfe.py strong_wolfe

    Args:
        lr: the step that a line search begins with; the first of all is lr min(1, 1/|g|_1).
        history: m, how many pairs (s, y) are remembered; with 0 it is steepest descent.
        portion: samples of a portion; much less than a worker's share of a batch, so that work can be shared.
        batches: mini-batches of every worker that make one batch.
        iterations: steps of L-BFGS on one batch.
    """
    return Sandblaster(lr, history, portion, batches, iterations)
