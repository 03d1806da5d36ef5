"""Rounds: how many local steps workers take before they average.

    period = 4, phase = "end"       . . . |  . . . |  . . . |        a dot is a step, | a step before an average
    period = 4, phase = "start"     |  . . . |  . . . |  . . .

With `overhead` the period is measured, such that averaging takes that fraction of the time. With `capped` a round is at
most a tenth of the run, so that a short run has several rounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from manyhands.core.errors import Refused, refuse_unless
from manyhands.core.port import Collective

TENTH = 10


@dataclass
class Rounds:
    """The position in a round, which is equal on all workers.

    Args:
        period: tau, steps of a round; None: one round, as long as the run.
        phase: whether the first round has its full length (end) or one step (start).
        capped: whether a round is at most a tenth of the run.
        overhead: the fraction of time that averaging may take; the period is then measured.
    """

    period: int | None = 1
    phase: Literal["end", "start"] = "end"
    capped: bool = False
    overhead: float | None = None

    def __post_init__(self) -> None:
        refuse_unless(self.period is None or self.period >= 1, "period", self.period, ">= 1")
        measurable = self.overhead is None or 0 < self.overhead < 1
        refuse_unless(measurable, "overhead", self.overhead, "> 0 and < 1")
        if self.phase not in ("end", "start"):
            raise Refused(f"phase is {self.phase!r}, but must be 'end' or 'start'")
        self.begin(0)

    def begin(self, steps: int) -> None:
        """Start the first round of a run of that many steps; 0 if the number is unknown."""
        self.longest = max(1, steps // TENTH) if steps else math.inf
        self.length = self.length_in(steps)
        self.taken = 0.0 if self.phase == "end" else self.length - 1

    def length_in(self, steps: int) -> float:
        """The number of steps of a round in a run of `steps`."""
        period = math.inf if self.period is None else self.period
        return min(period, max(1, steps // TENTH)) if self.capped and steps else period

    def remarks(self, steps: int) -> list[str]:
        """Where the rounds of such a run differ from the knobs."""
        length = self.length_in(steps)
        if self.capped and not steps:
            return [f"a round has {self.period} steps, because the length of the run is unknown: set period"]
        if self.period is None or length == self.period:
            return []
        return [f"a round has {length:.0f} steps, a tenth of the run, instead of {self.period}"]

    def step(self) -> bool:
        """Count a step; returns whether it was the last of its round."""
        self.taken += 1
        return self.taken >= self.length

    def end(self) -> None:
        """Start the next round."""
        self.taken = 0

    def measure(self, reducer: Collective, computing: float, averaging: float) -> None:
        """Choose the length of rounds by the seconds of a step and those of an average."""
        if self.overhead is None:
            return
        both = torch.tensor([computing, averaging], dtype=torch.float64)
        reducer.all_reduce(both)  # so that all workers choose the same length
        computed, averaged = both.tolist()
        wanted = math.ceil(averaged * (1 - self.overhead) / (self.overhead * computed)) if computed > 0 else 1
        self.length = min(max(1, wanted), self.longest)
