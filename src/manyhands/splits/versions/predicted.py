"""Predicted: passes use the weights that the stage is expected to have some updates later (SpecTrain).

    V <- W + s step          step: what the last update added to W; s: how many updates ahead

Stage k of K looks s_F = floor(k / 2) + K - k - 1 updates ahead in F and s_B = floor(k / 2) in B: to the moment at which
stage 0 finishes the mini-batch. Memory: V, which all mini-batches in flight share, and the last step. Nothing of the
rule's memory is used, so the prediction is right for any rule whose step changes slowly: momentum, Adam, weight decay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from manyhands.core.declared_state import StateParts, VectorState
from manyhands.core.weight_slice import WeightSlice
from manyhands.splits.versions.policy import StageWeights, Versions

Ahead = Callable[[str, int, int], int]
"""ahead(op, k, K): how many updates the pass F or B of stage k of K looks ahead."""


def to_the_end(op: str, k: int, K: int) -> int:
    """To the version in force when stage 0 finishes the mini-batch, as in the paper."""
    return k // 2 + (K - k - 1 if op == "F" else 0)


def to_own_update(op: str, k: int, K: int) -> int:
    """To the version of the stage's own backward pass."""
    return K - k - 1 if op == "F" else 0


class Predicted(Versions):
    """One extra memory with predicted weights."""

    rewrites = True
    ahead: Ahead = staticmethod(to_the_end)

    def __init__(self, stage: StageWeights) -> None:
        super().__init__(stage)
        self._step = [stage.ops.zeros_like(group.weights) for group in stage.flat.groups]
        self._memory = stage.copy()
        self._leaves = stage.leaves(self._memory)

    def forward(self, m: int, seen: int | None) -> tuple[list[Tensor], int | None]:
        """The predicted weights."""
        self.used[m] = self.version
        self._predict("F")
        return self._leaves, None

    def backward(self, m: int) -> None:
        self._predict("B")

    def _predict(self, op: str) -> None:
        """V <- W + s step"""
        steps, ops = self.ahead(op, self.stage.index, self.stage.stages), self.stage.ops
        for group, step, memory in zip(self.stage.flat.groups, self._step, self._memory, strict=True):
            ops.add(ops.copy(group.weights, memory), step, steps)

    def moves(self, m: int) -> list[WeightSlice]:
        """The live weights; `step` holds them until they have moved."""
        for group, step in zip(self.stage.flat.groups, self._step, strict=True):
            self.stage.ops.copy(group.weights, step)
        return self.slices

    def updated(self, m: int) -> None:
        super().updated(m)
        ops = self.stage.ops
        for group, step in zip(self.stage.flat.groups, self._step, strict=True):
            ops.add(ops.scale(step, -1), group.weights)

    @property
    def others(self) -> Sequence[Tensor]:
        """The predicted weights, and the last step."""
        return [*self._memory, *self._step]

    def state(self) -> StateParts:
        return {**super().state(), "step": VectorState(self.stage.flat.slots, self._step, "divided")}


class PredictedToOwnUpdate(Predicted):
    """The same, up to the stage's own update."""

    ahead: Ahead = staticmethod(to_own_update)


EXAMPLES: Mapping[str, Callable[[StageWeights], Predicted]] = {
    "predicted": Predicted,
    "predicted to own update": PredictedToOwnUpdate,
}
