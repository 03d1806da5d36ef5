"""Decoupled weight decay, as a link after the rule that makes the step: weights shrink beside it, not through it.

    step <- step - η λ w

Reference: I. Loshchilov, F. Hutter, "Decoupled Weight Decay Regularization", 2017, https://arxiv.org/abs/1711.05101.
`chain(Adam(η), WeightDecay(λ, η))` is `torch.optim.AdamW`. Decay that joins the gradient instead is a knob of the rules
themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from manyhands.core.errors import refuse_unless
from manyhands.core.protocols import At, State
from manyhands.rules.rate import Rate, check_rate, rate_at


@dataclass(frozen=True)
class WeightDecay:
    """Weights are pulled to zero beside the step.

    Args:
        decay: λ, how strongly.
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
        """Nothing to remember."""
        return {}

    def __call__(self, g: Tensor, at: At) -> Tensor:
        return g.add_(at.weights, alpha=-rate_at(self.lr, at) * self.decay)
