"""Bulk: everybody waits for everybody (Valiant's supersteps).

ready  all alive have pushed        admit  my own gradient has been applied
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from manyhands.core.protocols import Standing


@dataclass(frozen=True)
class Bulk:
    """One update per step, with the mean of all workers' gradients."""

    scope: ClassVar[Literal["shard", "job"]] = "shard"
    merges: ClassVar[bool] = True
    bounds_clocks: ClassVar[bool] = False
    tolerates_loss: ClassVar[bool] = False

    def ready(self, pending: int, alive: int) -> bool:
        """Everyone's gradient is there."""
        return pending >= max(alive, 1)

    def admit(self, me: Standing) -> bool:
        """My gradient has been applied."""
        return not me.waiting
