"""Bulk: every worker waits for all others (bulk synchronous parallel, Valiant's supersteps).

ready  all alive have pushed        admit  the worker's own gradient has been applied
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from manyhands.core.consistency import Consistency, WorkerClock


@dataclass(frozen=True)
class Bulk:
    """One update per step, with the mean of all workers' gradients."""

    scope: ClassVar[Literal["shard", "job"]] = "shard"
    merges: ClassVar[bool] = True
    bounds_clocks: ClassVar[bool] = False
    tolerates_loss: ClassVar[bool] = False

    def ready(self, pending: int, alive: int) -> bool:
        """Whether every worker's gradient is pending."""
        return pending >= max(alive, 1)

    def admit(self, me: WorkerClock) -> bool:
        """Whether this worker's gradient has been applied."""
        return not me.waiting


EXAMPLES: Mapping[str, Consistency] = {"bulk": Bulk()}
