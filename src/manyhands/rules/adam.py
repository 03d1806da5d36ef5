"""Adam: momentum divided by the root of the recent mean square, both corrected for their start at zero.

    m <- β1 m + (1 - β1) g        v <- β2 v + (1 - β2) g²        m = v = 0 at first
    step = -η m̂ / (√v̂ + ε)        m̂ = m / (1 - β1^t),  v̂ = v / (1 - β2^t)

Weight decay is added to the gradient (g + λ w) or, if `decoupled`, to the step (-η λ w), which is AdamW.

Reference: D. Kingma, J. Ba, "Adam", 2014, https://arxiv.org/abs/1412.6980; I. Loshchilov, F. Hutter, "Decoupled
Weight Decay Regularization", 2017, https://arxiv.org/abs/1711.05101. Equal to `torch.optim.Adam` and `AdamW`.

Where we differ: t is the number of the update of these weights, which the weight slice counts and not this rule, so
that the state can be cut and moved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from manyhands.core.errors import refuse_unless
from manyhands.core.rule import Rule, State, Twins, UpdateContext
from manyhands.rules.rate import Rate, check_rate, rate_at
from manyhands.rules.schedules import StepDecay


@dataclass(frozen=True)
class Adam:
    """Steps of about the same length in every coordinate, with momentum.

    Args:
        lr: η, or a function samples -> η.
        beta1: β1, the decay of the mean gradient.
        beta2: β2, the decay of the mean square.
        eps: ε, added to the root.
        weight_decay: λ, the strength of the decay.
        decoupled: apply λ to the weights and not to the gradient (AdamW).
    """

    lr: Rate
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False

    elementwise = True
    needs = frozenset[str]()

    def __post_init__(self) -> None:
        check_rate(self.lr)
        refuse_unless(0 <= self.beta1 < 1, "beta1", self.beta1, ">= 0 and < 1")
        refuse_unless(0 <= self.beta2 < 1, "beta2", self.beta2, ">= 0 and < 1")
        refuse_unless(self.eps > 0, "eps", self.eps, "> 0")
        refuse_unless(self.weight_decay >= 0, "weight_decay", self.weight_decay, ">= 0")

    def init(self, weights: Tensor) -> State:
        """m, the mean gradient, and v, the mean square."""
        return {"m": torch.zeros_like(weights), "v": torch.zeros_like(weights)}

    def __call__(self, g: Tensor, at: UpdateContext) -> Tensor:
        m, v, t = at.state["m"], at.state["v"], at.updates
        β1, β2, λ, η = self.beta1, self.beta2, self.weight_decay, rate_at(self.lr, at)
        if λ and not self.decoupled:
            g.add_(at.weights, alpha=λ)
        m.lerp_(g, 1 - β1)
        v.mul_(β2).addcmul_(g, g, value=1 - β2)
        # g is overwritten by √v̂ + ε, then by m / (√v̂ + ε)
        torch.sqrt(v, out=g).div_(sqrt(1 - β2**t)).add_(self.eps)
        torch.div(m, g, out=g).mul_(-η / (1 - β1**t))
        if λ and self.decoupled:
            g.add_(at.weights, alpha=-η * λ)
        return g


EXAMPLES: Mapping[str, Rule] = {
    "adam": Adam(0.01),
    "adam with decay": Adam(0.01, beta1=0.8, beta2=0.9, eps=1e-3, weight_decay=0.01),
    "adam with a schedule": Adam(StepDecay(0.1, 200, 0.5)),
    "adamw": Adam(0.01, weight_decay=0.1, decoupled=True),
    "adamw with a schedule": Adam(StepDecay(0.1, 200, 0.5), weight_decay=0.1, decoupled=True),
}
TWINS: Twins = {
    "adam": ("Adam", {"lr": 0.01}),
    "adam with decay": ("Adam", {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.01}),
    "adam with a schedule": ("Adam", {"lr": StepDecay(0.1, 200, 0.5)}),
    "adamw": ("AdamW", {"lr": 0.01, "weight_decay": 0.1}),
    "adamw with a schedule": ("AdamW", {"lr": StepDecay(0.1, 200, 0.5), "weight_decay": 0.1}),
}
