"""Aligned: both passes of a mini-batch use the version that stage 0 had chosen for it, on every stage (vertical sync).

The number of the version travels with the activation. A stage must keep every version from the last one that came:
each of K stages has K versions, and one more between an update and the next F.

    w(t+1) <- w(t) - eta grad f(w(t-K+1))          one delay for all stages
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from manyhands.core.weight_slice import WeightSlice
from manyhands.splits.versions.policy import StageWeights
from manyhands.splits.versions.stash import Stash


class Aligned(Stash):
    """Copies of the weights, by version; stage 0 chooses."""

    def __init__(self, stage: StageWeights) -> None:
        super().__init__(stage)
        self._chosen = self.version

    def forward(self, m: int, seen: int | None) -> tuple[list[Tensor], int | None]:
        """The version that came with the activation; on stage 0 the current one, which travels on."""
        self.used[m] = self._chosen = self.version if seen is None else seen
        self.keep_from(min(self.used.values()))
        copy = self.copied() if self._chosen == self.version else self._copies[self._chosen]
        return copy, self._chosen

    def moves(self, m: int) -> list[WeightSlice]:
        """The live weights; a mini-batch that comes later may still use them as they are now."""
        if self.stage.index:
            self.copied()
        return self.slices

    def updated(self, m: int) -> None:
        self.version += 1
        oldest = self._chosen if self.stage.index else self.version
        self.keep_from(min([*self.used.values(), oldest]))

    def settle(self) -> None:
        self._chosen = self.version
        self.keep_from(self.version)


EXAMPLES: Mapping[str, Callable[[StageWeights], Aligned]] = {"aligned": Aligned}
