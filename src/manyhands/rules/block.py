"""Block momentum: what a whole round of local training has changed is one large step, and such steps have inertia.

    G = -g                              g = W_g - mean of the workers: how far the round went, uphill
    Δ <- η Δ + ζ G                      Δ = 0 at first
    W <- W + Δ                          the filtered model: what is evaluated and saved

    W_g <- W                            classical: the next round starts there
    W_g <- W + η Δ                      Nesterov: it starts one step ahead

The weights that this rule moves are W_g, where rounds start. It is `torch.optim.SGD(lr=ζ, momentum=η)` on them, with
`nesterov` for the second kind.

Reference: K. Chen, Q. Huo, "Scalable training of deep learning machines by incremental block training with
intra-block parallel optimization and blockwise model-update filtering", 2016,
https://doi.org/10.1109/ICASSP.2016.7472805.

Where we differ: some widely used code adds Δ to the point ahead instead of to W, which counts the look-ahead twice;
`lookahead_base` does as they do.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from manyhands.core.errors import Refused, refuse_unless
from manyhands.core.protocols import At, State


@dataclass(frozen=True)
class Block:
    """Steps of whole rounds, with inertia.

    Args:
        lr: ζ, the block learning rate.
        momentum: η, the block momentum; None: 1 - 1/P, so that a round of P workers counts as much as P rounds of one.
        nesterov: start the next round one step ahead.
        lookahead_base: add the step to the point ahead, as some programs do.
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
            raise Refused("lookahead_base is given without nesterov, but only that looks ahead")

    def init(self, weights: Tensor) -> State:
        """Δ, the last step."""
        return {"step": torch.zeros_like(weights)}

    def momentum_at(self, at: At) -> float:
        """η, for so many workers."""
        return 1 - 1 / at.workers if self.momentum is None else self.momentum

    def __call__(self, g: Tensor, at: At) -> Tensor:
        Δ, η, ζ = at.state["step"], self.momentum_at(at), self.lr
        Δ.mul_(η).sub_(g, alpha=ζ)
        if not self.nesterov:
            return g.copy_(Δ)
        if self.lookahead_base:
            return torch.mul(Δ, 1 + η, out=g)
        return g.mul_(-ζ).add_(Δ, alpha=η)

    def outcome(self, at: At) -> Tensor:
        """W: without the look ahead."""
        return at.weights - self.momentum_at(at) * at.state["step"] if self.nesterov else at.weights
