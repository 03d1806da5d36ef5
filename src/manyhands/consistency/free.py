"""Free: nobody waits for anybody.

ready  at once                      admit  always
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from manyhands.core.protocols import Standing


@dataclass(frozen=True)
class Free:
    """Total asynchrony: every gradient is applied in full when it comes."""

    scope: ClassVar[Literal["shard", "job"]] = "shard"
    merges: ClassVar[bool] = False
    bounds_clocks: ClassVar[bool] = False
    tolerates_loss: ClassVar[bool] = True

    def ready(self, pending: int, alive: int) -> bool:
        """Any gradient will do."""
        return pending >= 1

    def admit(self, me: Standing) -> bool:
        """Whoever asks may read."""
        return True
