"""Adagrad: each coordinate has its own rate, which falls with the sum of its squared gradients.

    h <- h + g²                   h = 0 at first
    step = -η g / (√h + ε)        0 where √h + ε is 0

Reference: J. Duchi, E. Hazan, Y. Singer, "Adaptive Subgradient Methods", 2011,
https://jmlr.org/papers/v12/duchi11a.html; on a parameter server: J. Dean et al., "Large Scale Distributed Deep
Networks" (Downpour SGD), 2012, https://papers.nips.cc/paper/4687. With ε > 0 equal to `torch.optim.Adagrad`.

Where we differ: ε is 0 by default as in Downpour, so the step of a coordinate whose gradients were all 0 (or so small
that their squares are) is 0 instead of 0/0.
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
class Adagrad:
    """Steps that shrink where gradients were large.

    Args:
        lr: η, or a function samples -> η; the first step of a coordinate is exactly this long if `eps` is 0.
        eps: ε, added to the root.
    """

    lr: Rate
    eps: float = 0.0

    elementwise = True
    needs = frozenset[str]()

    def __post_init__(self) -> None:
        check_rate(self.lr)
        refuse_unless(self.eps >= 0, "eps", self.eps, ">= 0")

    def init(self, weights: Tensor) -> State:
        """h, the sum of squares."""
        return {"h": torch.zeros_like(weights)}

    def can_skip(self) -> bool:
        """Always: a gradient of 0 changes neither h nor the weights."""
        return True

    def __call__(self, g: Tensor, at: UpdateContext) -> Tensor:
        h = at.state["h"].addcmul_(g, g)
        root = h.sqrt()
        if self.eps:
            root.add_(self.eps)
        else:
            torch.threshold_(root, 0.0, torch.inf)  # 0 becomes infinity, in one pass without a mask
        return g.div_(root).mul_(-rate_at(self.lr, at))


EXAMPLES: Mapping[str, Rule] = {
    "adagrad": Adagrad(0.1, eps=1e-10),
    "adagrad without eps": Adagrad(0.1),
    "adagrad with a schedule": Adagrad(StepDecay(0.1, 200, 0.5)),
}
TWINS: Twins = {
    "adagrad": ("Adagrad", {"lr": 0.1}),
    "adagrad without eps": ("Adagrad", {"lr": 0.1, "eps": 0.0}),
    "adagrad with a schedule": ("Adagrad", {"lr": StepDecay(0.1, 200, 0.5), "eps": 0.0}),
}
