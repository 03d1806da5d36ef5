"""Stochastic gradient descent: go down the gradient.

    step = -η (g + λ w)

Reference: H. Robbins, S. Monro, "A Stochastic Approximation Method", 1951,
https://doi.org/10.1214/aoms/1177729586. Equal to `torch.optim.SGD`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from manyhands.core.errors import refuse_unless
from manyhands.core.native import step
from manyhands.core.protocols import At, State
from manyhands.rules.rate import Rate, check_rate, rate_at


@dataclass(frozen=True)
class Sgd:
    """Plain gradient steps.

    Args:
        lr: η, or a function samples -> η.
        weight_decay: λ, how strongly weights are pulled to zero.
    """

    lr: Rate
    weight_decay: float = 0.0

    elementwise = True
    needs = frozenset[str]()

    def __post_init__(self) -> None:
        check_rate(self.lr)
        refuse_unless(self.weight_decay >= 0, "weight_decay", self.weight_decay, ">= 0")

    def init(self, weights: Tensor) -> State:
        """Nothing to remember."""
        return {}

    def __call__(self, g: Tensor, at: At) -> Tensor:
        if self.weight_decay:
            g.add_(at.weights, alpha=self.weight_decay)
        return g.mul_(self.scale(at))

    def scale(self, at: At) -> float:
        """-η: without decay that is all."""
        return -rate_at(self.lr, at)

    def can_skip(self) -> bool:
        """Without decay no gradient is no step."""
        return not self.weight_decay

    def can_move(self, weights: Tensor) -> bool:
        """Decay needs a pass of its own; in half precision torch would not round η g before it adds."""
        return not self.weight_decay and weights.is_cpu and weights.dtype in (torch.float32, torch.float64)

    def move(self, g: Tensor, at: At, into: Tensor | None) -> None:
        """w <- w + (-η g), the product rounded before it is added."""
        step(at.weights, g, self.scale(at), into)
