"""Stochastic gradient descent: a step against the gradient.

    step = -η (g + λ w)

Reference: H. Robbins, S. Monro, "A Stochastic Approximation Method", 1951,
https://doi.org/10.1214/aoms/1177729586. Equal to `torch.optim.SGD`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from manyhands.core.errors import refuse_unless
from manyhands.core.rule import Rule, State, Twins, UpdateContext
from manyhands.core.vector_ops import step
from manyhands.rules.rate import Rate, check_rate, rate_at
from manyhands.rules.schedules import StepDecay


@dataclass(frozen=True)
class Sgd:
    """Plain gradient steps.

    Args:
        lr: η, or a function samples -> η.
        weight_decay: λ, added to the gradient as λ w.
    """

    lr: Rate
    weight_decay: float = 0.0

    elementwise = True
    needs = frozenset[str]()

    def __post_init__(self) -> None:
        check_rate(self.lr)
        refuse_unless(self.weight_decay >= 0, "weight_decay", self.weight_decay, ">= 0")

    def init(self, weights: Tensor) -> State:
        """No state."""
        return {}

    def __call__(self, g: Tensor, at: UpdateContext) -> Tensor:
        if self.weight_decay:
            g.add_(at.weights, alpha=self.weight_decay)
        return g.mul_(self.scale(at))

    def scale(self, at: UpdateContext) -> float:
        """-η; the whole step, unless there is weight decay."""
        return -rate_at(self.lr, at)

    def can_skip(self) -> bool:
        """Whether there is no weight decay."""
        return not self.weight_decay

    def can_move(self, weights: Tensor) -> bool:
        """Weight decay takes another pass; in half precision torch would not round η g before it is added."""
        return not self.weight_decay and weights.is_cpu and weights.dtype in (torch.float32, torch.float64)

    def move(self, g: Tensor, at: UpdateContext, into: Tensor | None) -> None:
        """w <- w + (-η g), the product rounded before it is added."""
        step(at.weights, g, self.scale(at), into)


EXAMPLES: Mapping[str, Rule] = {
    "sgd": Sgd(0.1),
    "sgd with decay": Sgd(0.1, weight_decay=0.01),
    "sgd with a schedule": Sgd(StepDecay(0.1, 200, 0.5)),
}
TWINS: Twins = {
    "sgd": ("SGD", {"lr": 0.1}),
    "sgd with decay": ("SGD", {"lr": 0.1, "weight_decay": 0.01}),
    "sgd with a schedule": ("SGD", {"lr": StepDecay(0.1, 200, 0.5)}),
}
