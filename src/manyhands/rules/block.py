"""Block momentum: the change of a round of local training is one large step, to which momentum is applied.

    G = -g                              g = W_g - mean of the workers' weights after the round
    Δ <- η Δ + ζ G                      Δ = 0 at first
    W <- W + Δ                          the filtered model, which is evaluated and saved

    W_g <- W                            classical: the next round starts there
    W_g <- W + η Δ                      Nesterov: it starts at the look-ahead point

The weights that this rule moves are W_g, where rounds start. It is `torch.optim.SGD(lr=ζ, momentum=η)` on them, with
`nesterov` for the second kind.

Reference: K. Chen, Q. Huo, "Scalable training of deep learning machines by incremental block training with
intra-block parallel optimization and blockwise model-update filtering", 2016,
https://doi.org/10.1109/ICASSP.2016.7472805.

Where we differ: some widely used code adds Δ to the point ahead instead of to W, which counts the look-ahead twice;
`lookahead_base` does the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from manyhands.core.errors import Refused, refuse_unless
from manyhands.core.rule import Rule, State, Twins, UpdateContext


@dataclass(frozen=True)
class Block:
    """Steps of whole rounds, with momentum.

    Args:
        lr: ζ, the block learning rate.
        momentum: η, the block momentum; None: 1 - 1/P, so that a round of P workers weighs as much as P rounds of one.
        nesterov: start the next round at the look-ahead point.
        lookahead_base: add the step to the look-ahead point, as some programs do.
    """

    lr: float = 1.0
    momentum: float | None = None
    nesterov: bool = False
    lookahead_base: bool = False

    elementwise = True
    needs = frozenset[str]()

    def __post_init__(self) -> None:
        refuse_unless(self.lr > 0, "lr", self.lr, "> 0")
        refuse_unless(0 <= (self.momentum or 0.0) < 1, "momentum", self.momentum, ">= 0 and < 1")
        if self.lookahead_base and not self.nesterov:
            raise Refused("lookahead_base is True, but must be False without nesterov: there is no look-ahead point")

    def init(self, weights: Tensor) -> State:
        """Δ, the last step."""
        return {"step": torch.zeros_like(weights)}

    def _momentum(self, at: UpdateContext) -> float:
        """η, for this number of workers."""
        return 1 - 1 / at.workers if self.momentum is None else self.momentum

    def __call__(self, g: Tensor, at: UpdateContext) -> Tensor:
        Δ, η, ζ = at.state["step"], self._momentum(at), self.lr
        Δ.mul_(η).sub_(g, alpha=ζ)
        if not self.nesterov:
            return g.copy_(Δ)
        if self.lookahead_base:
            return torch.mul(Δ, 1 + η, out=g)
        return g.mul_(-ζ).add_(Δ, alpha=η)

    def outcome(self, at: UpdateContext) -> Tensor:
        """W, without the look-ahead."""
        return at.weights - self._momentum(at) * at.state["step"] if self.nesterov else at.weights


EXAMPLES: Mapping[str, Rule] = {
    "block momentum": Block(0.5, momentum=0.7),
    "block momentum by workers": Block(),
    "block momentum, nesterov": Block(0.5, momentum=0.7, nesterov=True),
    "block momentum, look-ahead base": Block(0.5, momentum=0.7, nesterov=True, lookahead_base=True),
}
TWINS: Twins = {
    "block momentum": ("SGD", {"lr": 0.5, "momentum": 0.7}),
    "block momentum, nesterov": ("SGD", {"lr": 0.5, "momentum": 0.7, "nesterov": True}),
}
