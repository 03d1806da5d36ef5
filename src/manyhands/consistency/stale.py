"""Stale: no worker is ahead of the slowest by more than s clocks (stale synchronous parallel).

ready  at once (s > 0)              admit  clock - slowest <= s

At s = 0 a push of clock c must stay invisible until all workers have read at clock c; since a worker pushes
c only after it has read at c, it is enough to apply the pushes of one clock together, each in full.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from manyhands.core.consistency import Consistency, WorkerClock
from manyhands.core.errors import refuse_unless


@dataclass(frozen=True)
class Stale:
    """Bounded staleness.

    Args:
        staleness: s, how many clocks a worker may be ahead of the slowest when it reads.
    """

    staleness: int
    scope: ClassVar[Literal["shard", "job"]] = "shard"
    merges: ClassVar[bool] = False
    bounds_clocks: ClassVar[bool] = True
    tolerates_loss: ClassVar[bool] = True

    def __post_init__(self) -> None:
        refuse_unless(self.staleness >= 0, "staleness", self.staleness, ">= 0")

    def ready(self, pending: int, alive: int) -> bool:
        """Whether any gradient is pending; at s = 0 those of all workers, which are of one clock."""
        return pending >= (1 if self.staleness else max(alive, 1))

    def admit(self, me: WorkerClock) -> bool:
        """Whether the worker is at most s clocks ahead, and would read its own writes."""
        return me.clock - me.slowest <= self.staleness and not me.waiting


EXAMPLES: Mapping[str, Consistency] = {f"stale({s})": Stale(s) for s in range(3)}
