"""The faults of a virtual cluster, and their times. Ranks number the workers first, then the servers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from manyhands.core.errors import refuse_unless
from manyhands.core.units import seconds


@dataclass(frozen=True)
class _Fault:
    rank: int
    at: str | float = 0.0

    def __post_init__(self) -> None:
        refuse_unless(self.rank >= 0, "the rank of a fault", self.rank, ">= 0")
        seconds(self.at, "the time of a fault")


@dataclass(frozen=True)
class Die(_Fault):
    """The rank's process is killed."""

    why: str = "it died"


@dataclass(frozen=True)
class Stop(_Fault):
    """The rank's process is stopped; the watcher notices it at once and fences the rank."""

    why: str = "it was stopped"


@dataclass(frozen=True)
class CutLink(_Fault):
    """The rank can no longer be reached; the others treat it as lost."""

    why: str = "its link was cut"


@dataclass(frozen=True)
class SlowLink(_Fault):
    """The rank's link becomes `factor` times slower, in latency and in bandwidth."""

    factor: float = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_unless(0 < self.factor < math.inf, "factor", self.factor, "> 0 and finite")


@dataclass(frozen=True)
class Slow:
    """A straggler: these ranks compute `factor` times slower from time `at` on."""

    ranks: Sequence[int]
    factor: float = 5.0
    at: str | float = 0.0

    def __post_init__(self) -> None:
        refuse_unless(0 < self.factor < math.inf, "factor", self.factor, "> 0 and finite")
        refuse_unless(all(rank >= 0 for rank in self.ranks), "ranks", self.ranks, "all >= 0")
        seconds(self.at, "the time of a fault")


Fault = Die | Stop | CutLink | SlowLink | Slow
