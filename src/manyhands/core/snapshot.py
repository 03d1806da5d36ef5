"""Snapshots of a run: take one at the lead while all workers are quiescent, and load one before a run is resumed.

Both seed a worker's random generator anew, so that its draws depend only on the step the run has reached: a run that
continues after a checkpoint equals one that is resumed from it.
"""

from __future__ import annotations

import torch

from manyhands.core.buffers import merge_buffers
from manyhands.core.errors import Refused
from manyhands.core.gather import Gathered
from manyhands.core.state import BUFFER, Snapshot, own, section, under
from manyhands.core.strategy import Saved, Strategy, Weights
from manyhands.core.worker import Worker


def take_snapshot(
    step: int | None, w: Worker, strategy: Strategy, weights: Weights, state: Saved, gathered: Gathered
) -> Snapshot:
    """All that is saved of a run: weights, the strategy's state, and what `gather_buffers` has gathered.

    `step` counts updates of all workers together; None: derive it from the steps that each worker has taken.
    """
    positions = {rank: meta[0] for rank, (meta, _) in gathered.items()}
    for rank, ((_, _, *names), tensors) in gathered.items():
        state |= under(f"worker{w.replica_of(rank)}/{BUFFER}", dict(zip(names, tensors, strict=True)))
    if step is None:
        steps = [meta[1] for meta, _ in gathered.values()]
        step = max(steps) if strategy.traits.lockstep else sum(steps) // len(w.workers)
    return Snapshot(step, weights, merge_buffers(w, gathered), state, positions)


@torch.no_grad()
def load_snapshot(w: Worker, snapshot: Snapshot) -> None:
    """Load weights, buffers and position; a rank that the snapshot does not know gets the merged buffers."""
    parameters, buffers = dict(w.model.named_parameters()), dict(w.model.named_buffers())
    _refuse_misfit(parameters, snapshot.weights)
    _refuse_misfit(buffers, snapshot.buffers)
    saved = {**snapshot.weights, **snapshot.buffers, **section(own(w, snapshot.state), BUFFER)}
    for name, x in {**parameters, **buffers}.items():
        x.copy_(saved[name])
    w.step = snapshot.positions.get(w.rank, snapshot.step)
    reseed(w)


def _refuse_misfit(model: Weights, saved: Weights) -> None:
    shapes, saved_shapes = ({name: tuple(x.shape) for name, x in some.items()} for some in (model, saved))
    for name in sorted(shapes.keys() | saved_shapes.keys()):
        if shapes.get(name) != saved_shapes.get(name):
            here, there = (some.get(name, "missing") for some in (shapes, saved_shapes))
            raise Refused(f"{name} is {here} in the model, but must be {there} as in the checkpoint")


def reseed(w: Worker) -> None:
    """Make a worker's random draws depend on its step, not on the draws before it."""
    w.random.seed(f"{w.seed}/{w.replica}/{w.step}")
