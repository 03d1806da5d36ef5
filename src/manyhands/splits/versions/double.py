"""Double: two versions of the weights, whatever the depth of the pipeline (PipeDream-2BW).

An update has the gradients of the M micro-batches of one mini-batch, and those of mini-batch t see version t - 1:

    w(t+1) <- w(t) - eta grad f(w(t-1))          w(-1) = w(0)

Mini-batch t + 1 may have begun before the update with t: it sees version t, the newest one. After the update that is
the older one, and the memory of version t - 1 takes version t + 1: the two memories swap roles. If M >= K - 1, at most
two mini-batches are in flight together.

An optimizer of torch that is bound to one memory moves a third one, from which the new version is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from manyhands.core.declared_state import StateParts, VectorState
from manyhands.core.weight_slice import WeightSlice
from manyhands.splits.versions.policy import StageWeights, Versions


class Double(Versions):
    """The newest weights and those before the last update."""

    def __init__(self, stage: StageWeights) -> None:
        super().__init__(stage)
        self._is_bound = any("owner" in one.rule.needs for one in self.slices)
        newest = stage.copy() if self._is_bound else [group.weights for group in stage.flat.groups]
        self._memories = [newest, stage.copy()]
        self._leaves = [stage.leaves(memory) for memory in self._memories]
        self._newest = 0

    def forward(self, m: int, seen: int | None) -> tuple[list[Tensor], int | None]:
        """Version t - 1 for a micro-batch of mini-batch t."""
        is_ahead = m // self.stage.every > self.version
        self.used[m] = self.version if is_ahead else max(self.version - 1, 0)
        return self._leaves[self._newest if is_ahead else 1 - self._newest], None

    def moves(self, m: int) -> list[WeightSlice]:
        """The newest weights, copied into the memory of the older ones."""
        if not self._is_bound:
            for one, new, old in zip(self.slices, *self._in_order(), strict=True):
                one.weights = self.stage.ops.copy(new, old)
        return self.slices

    def updated(self, m: int) -> None:
        super().updated(m)
        _, older = self._in_order()
        if self._is_bound:
            for group, memory in zip(self.stage.flat.groups, older, strict=True):
                self.stage.ops.copy(group.weights, memory)
        else:
            self.stage.flat.move_to(older)
        self._newest = 1 - self._newest

    def _in_order(self) -> tuple[list[Tensor], list[Tensor]]:
        """The memory of the newest weights, and of those before."""
        return self._memories[self._newest], self._memories[1 - self._newest]

    @property
    def kept(self) -> int:
        return 2

    @property
    def others(self) -> Sequence[Tensor]:
        newest, older = self._in_order()
        return [*newest, *older] if self._is_bound else older

    def state(self) -> StateParts:
        older = VectorState(self.stage.flat.slots, self._in_order()[1], "divided")
        return {**super().state(), "older": older}


EXAMPLES: Mapping[str, Callable[[StageWeights], Double]] = {"double": Double}
