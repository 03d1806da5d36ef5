"""Free: no worker waits for another.

ready  at once                      admit  always
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from manyhands.core.consistency import Consistency, WorkerClock


@dataclass(frozen=True)
class Free:
    """Total asynchrony: every gradient is applied in full when it is received."""

    scope: ClassVar[Literal["shard", "job"]] = "shard"
    merges: ClassVar[bool] = False
    bounds_clocks: ClassVar[bool] = False
    tolerates_loss: ClassVar[bool] = True

    def ready(self, pending: int, alive: int) -> bool:
        """Whether any gradient is pending."""
        return pending >= 1

    def admit(self, me: WorkerClock) -> bool:
        """Always."""
        return True


EXAMPLES: Mapping[str, Consistency] = {"free": Free()}
