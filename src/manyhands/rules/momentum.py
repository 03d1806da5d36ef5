"""Heavy ball: the step is a fading sum of all gradients so far.

    m <- μ m + (g + λ w)          m = 0 at first
    step = -η m                   heavy ball
    step = -η (g + λ w + μ m)     with `nesterov`

Reference: B. Polyak, "Some methods of speeding up the convergence of iteration methods", 1964,
https://doi.org/10.1016/0041-5553(64)90137-5; I. Sutskever et al., "On the importance of initialization and momentum
in deep learning", 2013, https://proceedings.mlr.press/v28/sutskever13.html. Equal to `torch.optim.SGD(momentum=μ)`.

Where we differ: η multiplies the sum and not each gradient, so a change of η rescales the past; and μ may be
negative, because asynchrony acts like momentum of its own and one may want to take some away (I. Mitliagkas et al.,
"Asynchrony begets momentum", 2016, https://arxiv.org/abs/1605.09774).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from manyhands.core.errors import refuse_unless
from manyhands.core.protocols import At, State
from manyhands.rules.rate import Rate, check_rate, rate_at


@dataclass(frozen=True)
class Momentum:
    """Gradient steps with inertia.

    Args:
        lr: η, or a function samples -> η.
        momentum: μ, what remains of the sum after each update; negative values brake.
        weight_decay: λ, how strongly weights are pulled to zero.
        nesterov: look one step ahead.
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
        """m, the fading sum."""
        return {"m": torch.zeros_like(weights)}

    def __call__(self, g: Tensor, at: At) -> Tensor:
        m, μ, η = at.state["m"], self.momentum, rate_at(self.lr, at)
        if self.weight_decay:
            g.add_(at.weights, alpha=self.weight_decay)
        m.mul_(μ).add_(g)
        if self.nesterov:
            return g.add_(m, alpha=μ).mul_(-η)
        return torch.mul(m, -η, out=g)
