"""Decoupled weight decay, a link after the rule that makes the step: the decay is added to the step.

    step <- step - η λ w

Reference: I. Loshchilov, F. Hutter, "Decoupled Weight Decay Regularization", 2017, https://arxiv.org/abs/1711.05101.
`chain(Adam(η), WeightDecay(λ, η))` is `torch.optim.AdamW`. Decay that is added to the gradient is a knob of the other
rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from manyhands.core.errors import refuse_unless
from manyhands.core.rule import Rule, State, UpdateContext
from manyhands.rules.rate import Rate, check_rate, rate_at


@dataclass(frozen=True)
class WeightDecay:
    """Weights decay independently of the gradient.

    Args:
        decay: λ, the strength of the decay.
        lr: η, or a function samples -> η: that of the rule before it.
    """

    decay: float
    lr: Rate

    elementwise = True
    needs = frozenset[str]()

    def __post_init__(self) -> None:
        refuse_unless(self.decay >= 0, "decay", self.decay, ">= 0")
        check_rate(self.lr)

    def init(self, weights: Tensor) -> State:
        """No state."""
        return {}

    def __call__(self, g: Tensor, at: UpdateContext) -> Tensor:
        return g.add_(at.weights, alpha=-rate_at(self.lr, at) * self.decay)


EXAMPLES: Mapping[str, Rule] = {"weight decay": WeightDecay(0.1, 0.01)}
