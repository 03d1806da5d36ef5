"""RMSProp: divide each coordinate by the root of its recent mean square.

    v <- α v + (1 - α) g²         v = 0 at first; g includes λ w
    step = -η g / (√v + ε)

Reference: T. Tieleman, G. Hinton, "Lecture 6.5: rmsprop", 2012,
https://www.cs.toronto.edu/~tijmen/csc321/slides/lecture_slides_lec6.pdf. Equal to `torch.optim.RMSprop` without its
momentum and centring.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from manyhands.core.errors import refuse_unless
from manyhands.core.rule import Rule, State, Twins, UpdateContext
from manyhands.rules.rate import Rate, check_rate, rate_at
from manyhands.rules.schedules import StepDecay


@dataclass(frozen=True)
class RmsProp:
    """Steps of about the same length in every coordinate.

    Args:
        lr: η, or a function samples -> η.
        alpha: α, the decay of the mean square.
        eps: ε, added to the root.
        weight_decay: λ, added to the gradient as λ w.
    """

    lr: Rate
    alpha: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0

    elementwise = True
    needs = frozenset[str]()

    def __post_init__(self) -> None:
        check_rate(self.lr)
        refuse_unless(0 <= self.alpha < 1, "alpha", self.alpha, ">= 0 and < 1")
        refuse_unless(self.eps > 0, "eps", self.eps, "> 0")
        refuse_unless(self.weight_decay >= 0, "weight_decay", self.weight_decay, ">= 0")

    def init(self, weights: Tensor) -> State:
        """v, the mean square."""
        return {"v": torch.zeros_like(weights)}

    def __call__(self, g: Tensor, at: UpdateContext) -> Tensor:
        α = self.alpha
        if self.weight_decay:
            g.add_(at.weights, alpha=self.weight_decay)
        v = at.state["v"].mul_(α).addcmul_(g, g, value=1 - α)
        return g.div_(v.sqrt().add_(self.eps)).mul_(-rate_at(self.lr, at))


EXAMPLES: Mapping[str, Rule] = {
    "rmsprop": RmsProp(0.01),
    "rmsprop with decay": RmsProp(0.01, alpha=0.9, eps=1e-3, weight_decay=0.01),
    "rmsprop with a schedule": RmsProp(StepDecay(0.1, 200, 0.5)),
}
TWINS: Twins = {
    "rmsprop": ("RMSprop", {"lr": 0.01}),
    "rmsprop with decay": ("RMSprop", {"lr": 0.01, "alpha": 0.9, "eps": 1e-3, "weight_decay": 0.01}),
    "rmsprop with a schedule": ("RMSprop", {"lr": StepDecay(0.1, 200, 0.5)}),
}
