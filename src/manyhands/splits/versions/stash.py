"""Stash: the backward pass of a mini-batch uses the same weights as its forward pass (PipeDream).

There is one copy of the weights per version, from the first F that uses it to the last update; mini-batches of one
version share it. Stage s of K has at most K - s versions under 1F1B. The last stage needs no copy, because nothing is
updated between its two passes of a mini-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from manyhands.splits.versions.policy import StageWeights, Versions


class Stash(Versions):
    """Copies of the weights, by version."""

    def __init__(self, stage: StageWeights) -> None:
        super().__init__(stage)
        self._copies: dict[int, list[Tensor]] = {}

    def forward(self, m: int, seen: int | None) -> tuple[list[Tensor], int | None]:
        """The copy of the current version, for both passes."""
        self.used[m] = self.version
        is_last = self.stage.index == self.stage.stages - 1
        return self.stage.live if is_last else self.copied(), None

    def copied(self) -> list[Tensor]:
        """A copy of the live weights, the same one until the next update."""
        if self.version not in self._copies:
            self._copies[self.version] = self.stage.leaves(self.stage.copy())
        return self._copies[self.version]

    def updated(self, m: int) -> None:
        super().updated(m)
        self.keep_from(min(self.used.values(), default=self.version))

    def keep_from(self, oldest: int) -> None:
        """Delete the copies of versions before this one."""
        for version in [version for version in self._copies if version < oldest]:
            del self._copies[version]

    @property
    def kept(self) -> int:
        return len({*self._copies, self.version})

    @property
    def others(self) -> Sequence[Tensor]:
        return [x for copy in self._copies.values() for x in copy]


EXAMPLES: Mapping[str, Callable[[StageWeights], Stash]] = {"stash": Stash}
