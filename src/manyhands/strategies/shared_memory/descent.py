"""Descent: a step of plain SGD that the model itself computes and writes into the shared weights.

    read w_v for v in the support, compute g_v          other workers write at the same time
    w_v <- w_v - eta g_v, sample by sample              one update per mini-batch, but others may see half of it

A model can do this (`Descends`) if it knows which weights a mini-batch touches. The result is the update that autograd
and the rule would make, rounded differently where two samples share a v, but nothing of the size of the model is read
or written. Fields with names are left to autograd: only the forward pass knows which is which.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from manyhands.collectives.update_counts import UpdateCounts
from manyhands.core.rule import Scales, UpdateContext, scales
from manyhands.core.strategy import Batch
from manyhands.core.weight_slice import WeightSlice
from manyhands.core.worker import Worker


class Descent(Protocol):
    """A step of plain SGD that a model has computed but not yet written."""

    @property
    def loss(self) -> Tensor:
        """The loss of the mini-batch, at the weights that were read."""

    @property
    def touches(self) -> int:
        """How many numbers `write` writes."""

    @property
    def write(self) -> Callable[[float], None]:
        """write(scale): w_v <- w_v + scale g_v in place, for the v that the mini-batch touches and no others."""


@runtime_checkable
class Descends(Protocol):
    """A model that computes the gradient of some losses itself, for the weights that a mini-batch touches."""

    def can_descend(self, loss: Callable[..., Tensor] | None) -> bool:
        """Whether it knows the gradient of this loss (None: its own) for all of its parameters that are trained."""

    def descend(self, *fields: Tensor) -> Descent:
        """Read the weights and compute `loss(self(*fields), target)` and its gradient; write nothing yet."""


def descending_model(w: Worker, slices: Sequence[WeightSlice]) -> Descends | None:
    """The model of a worker if it can write its own steps: it knows the gradient, and the rule only scales it."""
    if w.task.sizes_only or w.task.gradient is not None or not isinstance(w.model, Descends):
        return None
    rules = [one.rule for one in slices]
    is_plain = len(rules) == 1 and scales(rules[0])
    return w.model if is_plain and w.model.can_descend(w.task.loss) else None


def descend(w: Worker, model: Descends, weight_slice: WeightSlice, batch: Batch, updates: UpdateCounts) -> float:
    """Let the model compute and write one step; the loss."""
    w.seed_torch(w.rank, w.step)
    with w.timer.computing():
        step = model.descend(*batch)
        loss = w.checked(step.loss)
        w.charge_passes(len(batch[0]))
    w.ops.computes(weight_slice.weights[: step.touches], passes=2)
    for index in range(len(weight_slice.counts)):
        weight_slice.counts[index] += 1
    assert isinstance(weight_slice.rule, Scales)
    at = UpdateContext(weight_slice.weights, updates=weight_slice.counts[0], samples=w.samples)
    step.write(weight_slice.rule.scale(at))
    w.lag = updates.written()
    return loss
