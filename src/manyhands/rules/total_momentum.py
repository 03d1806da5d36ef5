"""Heavy ball for asynchronous workers: asynchrony acts like momentum, and the rule adds only the rest.

    μ_S = 1 - 1/M                 the momentum of M asynchronous workers, if staleness is geometric
    μ   = max(lowest, μ* - μ_S)   the momentum to add; below 0 it damps
    m <- μ m + g                  m = 0 at first
    step = -η m

M is the number of workers divided by the number of gradients in an update, so in lockstep μ is μ*.

Reference: I. Mitliagkas, C. Zhang, S. Hadjis, C. Ré, "Asynchrony begets momentum, with an application to deep
learning", 2016, https://arxiv.org/abs/1605.09774.

Where we differ: the paper finds μ by a search around this value. M is the number at the start of the run: if workers
are lost or have finished, μ does not change, since the length of a step would jump with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from manyhands.core.errors import refuse_unless
from manyhands.core.rule import Rule, State, Twins, UpdateContext
from manyhands.rules.rate import Rate, check_rate, rate_at


@dataclass(frozen=True)
class TotalMomentum:
    """Momentum such that its sum with that of asynchrony has a given value.

    Args:
        lr: η, or a function samples -> η.
        total: μ*, the best momentum of one worker.
        lowest: the lower bound of μ, for any number of workers.
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
        """m, the decaying sum of gradients."""
        return {"m": torch.zeros_like(weights)}

    def __call__(self, g: Tensor, at: UpdateContext) -> Tensor:
        m = at.state["m"].mul_(self._added(at)).add_(g)
        return torch.mul(m, -rate_at(self.lr, at), out=g)

    def _added(self, at: UpdateContext) -> float:
        """μ, for this number of workers."""
        μ_S = 1 - 1 / max(1, at.workers / at.count)
        return max(self.lowest, self.total - μ_S)


EXAMPLES: Mapping[str, Rule] = {"total momentum": TotalMomentum(0.1, 0.9)}
TWINS: Twins = {"total momentum": ("SGD", {"lr": 0.1, "momentum": 0.9})}
