"""Copies: 2K - 1 copies of the weights, which mini-batches use in turn, each with a rule's memory of its own.

    mini-batch m    copy c = m mod C on every stage, C = 2K - 1, for both passes and for the update

At most C mini-batches are in flight under Figure 5, so that B(m) is over everywhere before m + C begins: each copy is
trained by plain SGD, with its own 1/C of the mini-batches. At the end of a round the copies that have moved are
averaged, and all copies take the mean; every one keeps the rule's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from manyhands.core.declared_state import CustomState, RuleState, StateParts
from manyhands.core.errors import refuse_unless
from manyhands.core.strategy import Saved
from manyhands.core.weight_slice import WeightSlice
from manyhands.splits.versions.policy import StageWeights, Versions


class Copies(Versions):
    """C copies of the weights; the live weights are their mean after each round."""

    def __init__(self, stage: StageWeights) -> None:
        super().__init__(stage)
        self.count = 2 * stage.stages - 1
        self._memories = [stage.copy() for _ in range(self.count)]
        self._leaves = [stage.leaves(memory) for memory in self._memories]
        self._slices = [stage.slices(memory) for memory in self._memories]
        self._updates = [0] * self.count
        """By copy, in this round."""

    def forward(self, m: int, seen: int | None) -> tuple[list[Tensor], int | None]:
        """The copy of this mini-batch, for both passes."""
        self.used[m] = self._updates[m % self.count]
        return self._leaves[m % self.count], None

    def moves(self, m: int) -> list[WeightSlice]:
        """That copy."""
        return self._slices[m % self.count]

    def updated(self, m: int) -> None:
        self._updates[m % self.count] += 1

    def done(self, m: int) -> int:
        return self._updates[m % self.count] - self.used.pop(m)

    def settle(self) -> None:
        """A: all copies take the mean of those that have moved in this round."""
        assert not self.used, f"copies are averaged while mini-batches {sorted(self.used)} are in flight"
        moved = [memory for memory, updates in zip(self._memories, self._updates, strict=True) if updates]
        ops = self.stage.ops
        for number, group in enumerate(self.stage.flat.groups if moved else ()):
            ops.copy(moved[0][number], group.weights)
            for memory in moved[1:]:
                ops.add(group.weights, memory[number])
            ops.divide(group.weights, len(moved))
            for memory in self._memories:
                ops.copy(group.weights, memory[number])
        self._updates = [0] * self.count

    @property
    def kept(self) -> int:
        return self.count

    def state(self) -> StateParts:
        """The memory of every copy's rule; all copies have the same weights when a run is saved."""
        slots = self.stage.flat.slots
        rules = {f"rule{c}": RuleState(slots, one, "divided") for c, one in enumerate(self._slices)}
        return {"copies": CustomState("shared", self._read, self._write), **rules}

    def _read(self) -> Saved:
        return {"": torch.tensor(self.count)}

    def _write(self, saved: Sequence[Saved]) -> None:
        for one in saved:
            if one:
                found, reason = int(one[""]), "as in the checkpoint: 2K - 1 for K stages"
                refuse_unless(found == self.count, "the number of copies", self.count, f"{found}, {reason}")


EXAMPLES: Mapping[str, Callable[[StageWeights], Copies]] = {"copies": Copies}
