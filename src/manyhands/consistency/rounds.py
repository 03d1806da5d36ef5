"""Rounds: how long workers train on their own before they combine.

    period = 4, phase = "end"       . . . |  . . . |  . . . |        a dot is a step, | one after which all combine
    period = 4, phase = "start"     |  . . . |  . . . |  . . .

With `overhead` the period is found by measuring: combining may take that share of the time. With `capped` a round is
at most a tenth of the run, so that a short run has rounds at all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from manyhands.core.errors import Refused, refuse_unless
from manyhands.core.protocols import Collective

TENTH = 10


@dataclass
class Rounds:
    """Where in a round the workers are; the same on all of them.

    Args:
        period: tau, steps of a round; None: one round, as long as the run.
        phase: whether the first round has its full length (end) or one step (start).
        capped: whether a round is at most a tenth of the run.
        overhead: the share of time that combining may take, if the period is to be measured.
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
        """The first round of a run of that many steps; 0: nobody knows how many."""
        self.longest = max(1, steps // TENTH) if steps else math.inf
        self.length = self.length_in(steps)
        self.taken = 0.0 if self.phase == "end" else self.length - 1

    def length_in(self, steps: int) -> float:
        """How many steps a round has in a run of that many."""
        period = math.inf if self.period is None else self.period
        return min(period, max(1, steps // TENTH)) if self.capped and steps else period

    def remarks(self, steps: int) -> list[str]:
        """What one should know about a run of that many steps."""
        length = self.length_in(steps)
        if self.period is None or length == self.period:
            return []
        return [f"a round has {length:.0f} steps, a tenth of the run, instead of {self.period}"]

    def step(self) -> bool:
        """A step was taken; says whether it was the last of its round."""
        self.taken += 1
        return self.taken >= self.length

    def end(self) -> None:
        """All have combined."""
        self.taken = 0

    def measure(self, everyone: Collective, computing: float, combining: float) -> None:
        """Given the seconds of a step and those of combining, make rounds as long as they must be."""
        if self.overhead is None:
            return
        both = torch.tensor([computing, combining], dtype=torch.float64)
        everyone.all_reduce(both)  # so that all choose the same
        computed, combined = both.tolist()
        wanted = math.ceil(combined * (1 - self.overhead) / (self.overhead * computed)) if computed > 0 else 1
        self.length = min(max(1, wanted), self.longest)
