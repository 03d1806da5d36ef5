"""Stash: the backward pass of a micro-batch uses the same weights as its forward pass (PipeDream).

There is one copy of the weights per version, from the first F that uses it to the last B; micro-batches of one version
share it. Stage s of K has at most K - s versions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from manyhands.core.vector_ops import VectorOps


class Stash:
    """Copies of the weights, by version."""

    def __init__(self) -> None:
        self.version = 0
        self._copies: dict[int, list[Tensor]] = {}
        self._used: dict[int, int] = {}

    def forward(self, m: int, live: list[Tensor], ops: VectorOps) -> list[Tensor]:
        """The weights that F(m) and B(m) compute with: a copy of the current version."""
        if self.version not in self._copies:
            ops.computes(*live)
            self._copies[self.version] = [x.detach().clone().requires_grad_() for x in live]
        self._used[m] = self.version
        return self._copies[self.version]

    def updated(self) -> None:
        """The live weights have been updated: delete copies that no micro-batch in flight uses."""
        self.version += 1
        used = set(self._used.values())
        self._copies = {version: copy for version, copy in self._copies.items() if version in used}

    def done(self, m: int) -> int:
        """Return by how many updates the weights of B(m) were behind the live ones."""
        return self.version - self._used.pop(m)

    @property
    def kept(self) -> int:
        """The number of versions that have a copy."""
        return len(self._copies)


EXAMPLES: Mapping[str, Callable[[], Stash]] = {"stash": Stash}
