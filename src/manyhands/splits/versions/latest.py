"""Latest: both passes of a micro-batch use the weights as they are. Right when updates wait for a flush."""

from __future__ import annotations

from torch import Tensor


class Latest:
    """The live weights; nothing is kept."""

    def forward(self, m: int, live: list[Tensor]) -> list[Tensor]:
        """The weights that F(m) and B(m) compute with."""
        return live

    def updated(self) -> None:
        """The live weights have moved on."""

    def done(self, m: int) -> int:
        """B(m) is over; how many updates its weights were behind."""
        return 0
