"""Heavy ball: the step is an exponentially decaying sum of all gradients so far.

    m <- μ m + (g + λ w)          m = 0 at first
    step = -η m                   heavy ball
    step = -η (g + λ w + μ m)     with `nesterov`

Reference: B. Polyak, "Some methods of speeding up the convergence of iteration methods", 1964,
https://doi.org/10.1016/0041-5553(64)90137-5; I. Sutskever et al., "On the importance of initialization and momentum
in deep learning", 2013, https://proceedings.mlr.press/v28/sutskever13.html. Equal to `torch.optim.SGD(momentum=μ)`.

Where we differ: η multiplies the sum and not each gradient, so a change of η rescales the past; and μ may be
negative, because asynchrony acts like additional momentum, which a negative μ compensates (I. Mitliagkas et al.,
"Asynchrony begets momentum", 2016, https://arxiv.org/abs/1605.09774).
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
class Momentum:
    """Gradient steps with momentum.

    Args:
        lr: η, or a function samples -> η.
        momentum: μ, the factor of the sum in each update; negative values damp.
        weight_decay: λ, added to the gradient as λ w.
        nesterov: use Nesterov's look-ahead.
    """

    lr: Rate
    momentum: float = 0.9
    weight_decay: float = 0.0
    nesterov: bool = False

    elementwise = True
    needs = frozenset[str]()

    def __post_init__(self) -> None:
        check_rate(self.lr)
        refuse_unless(-1 < self.momentum < 1, "momentum", self.momentum, "> -1 and < 1")
        refuse_unless(self.weight_decay >= 0, "weight_decay", self.weight_decay, ">= 0")

    def init(self, weights: Tensor) -> State:
        """m, the decaying sum of gradients."""
        return {"m": torch.zeros_like(weights)}

    def __call__(self, g: Tensor, at: UpdateContext) -> Tensor:
        m, μ, η = at.state["m"], self.momentum, rate_at(self.lr, at)
        if self.weight_decay:
            g.add_(at.weights, alpha=self.weight_decay)
        m.mul_(μ).add_(g)
        if self.nesterov:
            return g.add_(m, alpha=μ).mul_(-η)
        return torch.mul(m, -η, out=g)


EXAMPLES: Mapping[str, Rule] = {
    "momentum": Momentum(0.1, 0.9),
    "momentum with decay": Momentum(0.1, 0.8, weight_decay=0.01),
    "momentum with a schedule": Momentum(StepDecay(0.1, 200, 0.5), 0.9),
    "momentum, nesterov": Momentum(0.1, 0.9, nesterov=True),
    "negative momentum": Momentum(0.1, -0.5),
}
TWINS: Twins = {
    "momentum": ("SGD", {"lr": 0.1, "momentum": 0.9}),
    "momentum with decay": ("SGD", {"lr": 0.1, "momentum": 0.8, "weight_decay": 0.01}),
    "momentum with a schedule": ("SGD", {"lr": StepDecay(0.1, 200, 0.5), "momentum": 0.9}),
    "momentum, nesterov": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
}
