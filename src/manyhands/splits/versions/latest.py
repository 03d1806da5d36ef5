"""Latest: both passes of a micro-batch use the current weights. For schedules whose updates wait for a flush."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from manyhands.core.vector_ops import VectorOps


class Latest:
    """The live weights, without copies."""

    def forward(self, m: int, live: list[Tensor], ops: VectorOps) -> list[Tensor]:
        """The weights that F(m) and B(m) compute with."""
        return live

    def updated(self) -> None:
        """The live weights have been updated."""

    def done(self, m: int) -> int:
        """Return by how many updates the weights of B(m) were behind the live ones: 0."""
        return 0


EXAMPLES: Mapping[str, Callable[[], Latest]] = {"latest": Latest}
