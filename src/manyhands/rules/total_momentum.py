"""Heavy ball among asynchronous workers: only as much momentum as asynchrony does not bring by itself.

    μ_S = 1 - 1/M                 what M workers that come when it suits them amount to: geometric staleness
    μ   = max(lowest, μ* - μ_S)   what is left to be added; below 0 it brakes
    m <- μ m + g                  m = 0 at first
    step = -η m

M is the number of workers over the number of gradients that make one update, so in lock step μ is μ*.

Reference: I. Mitliagkas, C. Zhang, S. Hadjis, C. Ré, "Asynchrony begets momentum, with an application to deep
learning", 2016, https://arxiv.org/abs/1605.09774.

Where we differ: the paper finds μ by a search around this value. M is what the job began with: if workers are lost or
have finished, momentum stays, since a jump of it would be a jump of the step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from manyhands.core.errors import refuse_unless
from manyhands.core.protocols import At, State
from manyhands.rules.rate import Rate, check_rate, rate_at


@dataclass(frozen=True)
class TotalMomentum:
    """Momentum that together with that of asynchrony makes a given sum.

    Args:
        lr: η, or a function samples -> η.
        total: μ*, the best momentum of one worker.
        lowest: the least momentum to add, however many workers there are.
    """

    lr: Rate
    total: float = 0.9
    lowest: float = -0.9

    elementwise = True
    needs = frozenset[str]()

    def __post_init__(self) -> None:
        check_rate(self.lr)
        refuse_unless(0 <= self.total < 1, "total", self.total, ">= 0 and < 1")
        refuse_unless(-1 < self.lowest < 1, "lowest", self.lowest, "> -1 and < 1")

    def init(self, weights: Tensor) -> State:
        """m, the fading sum."""
        return {"m": torch.zeros_like(weights)}

    def __call__(self, g: Tensor, at: At) -> Tensor:
        m = at.state["m"].mul_(self.added(at)).add_(g)
        return torch.mul(m, -rate_at(self.lr, at), out=g)

    def added(self, at: At) -> float:
        """μ."""
        μ_S = 1 - 1 / max(1, at.workers / at.count)
        return max(self.lowest, self.total - μ_S)
