"""Copies: 2K - 1 copies of the weights, which mini-batches use in turn, each with a rule's memory of its own.

    mini-batch m    copy c = m mod C on every stage, C = 2K - 1, for both passes and for the update

At most C mini-batches are in flight under Figure 5, so that B(m) is over everywhere before m + C begins: each copy is
trained by plain SGD, with its own 1/C of the mini-batches. At the end of a round the copies that have moved are
averaged, and all copies take the mean; every one keeps the rule's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from manyhands.core.declared_state import Scope, StateParts
from manyhands.core.errors import refuse_unless
from manyhands.core.flat import ParamSlot
from manyhands.core.state import StateSlice, restore, section, state_slices
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
        self.slices = [one for slices in self._slices for one in slices]
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

    @property
    def others(self) -> Sequence[Tensor]:
        return [x for memory in self._memories for x in memory]

    def state(self) -> StateParts:
        """The memory of every copy's rule; all copies have the same weights when a run is saved."""
        return {"rules": RulesOfCopies(self.stage.flat.slots, self._slices)}


@dataclass(frozen=True)
class RulesOfCopies:
    """The state of the rule of every copy: `rules/COPY/PARAMETER/...` in a checkpoint."""

    slots: Sequence[ParamSlot]
    copies: Sequence[Sequence[WeightSlice]]
    scope: Scope = "divided"

    def save(self) -> Iterable[StateSlice]:
        for c, slices in enumerate(self.copies):
            for piece in state_slices(slices, self.slots):
                yield piece._replace(name=f"{c}/{piece.name}")

    def load(self, saved: Sequence[Saved]) -> None:
        for one in saved:
            found = 1 + max((int(name.partition("/")[0]) for name in one), default=len(self.copies) - 1)
            reason = f"{found}, as in the checkpoint: 2K - 1 for K stages"
            refuse_unless(found == len(self.copies), "the number of copies", len(self.copies), reason)
            for c, slices in enumerate(self.copies):
                restore(slices, self.slots, section(one, str(c)))


EXAMPLES: Mapping[str, Callable[[StageWeights], Copies]] = {"copies": Copies}
