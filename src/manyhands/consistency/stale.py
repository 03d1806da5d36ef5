"""Stale: nobody runs ahead of the slowest by more than s clocks.

ready  at once (s > 0)              admit  clock - slowest <= s

At s = 0 a push of clock c must stay invisible until everyone has read at clock c; since a worker pushes
c only after it has read at c, it is enough to apply the pushes of one clock together, each in full.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from manyhands.core.errors import refuse_unless
from manyhands.core.protocols import Standing


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
        """Any gradient will do, but at s = 0 those of one clock belong together."""
        return pending >= (1 if self.staleness else max(alive, 1))

    def admit(self, me: Standing) -> bool:
        """I am not too far ahead, and I would see my own writes."""
        return me.clock - me.slowest <= self.staleness and not me.waiting
