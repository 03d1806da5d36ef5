"""Adagrad: each coordinate has a rate of its own, which falls with the squares it has seen.

    h <- h + g²                   h = 0 at first
    step = -η g / (√h + ε)        0 where √h + ε is 0

Reference: J. Duchi, E. Hazan, Y. Singer, "Adaptive Subgradient Methods", 2011,
https://jmlr.org/papers/v12/duchi11a.html; on a parameter server: J. Dean et al., "Large Scale Distributed Deep
Networks" (Downpour SGD), 2012, https://papers.nips.cc/paper/4687. With ε > 0 equal to `torch.optim.Adagrad`.

Where we differ: ε is 0 by default as in Downpour, hence a coordinate that has only seen gradients of 0 (or so small
that their square is) stays where it is instead of becoming 0/0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from manyhands.core.errors import refuse_unless
from manyhands.core.protocols import At, State
from manyhands.rules.rate import Rate, check_rate, rate_at


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
        """Without a gradient h stays, and nothing moves."""
        return True

    def __call__(self, g: Tensor, at: At) -> Tensor:
        h = at.state["h"].addcmul_(g, g)
        root = h.sqrt()
        if self.eps:
            root.add_(self.eps)
        else:
            torch.threshold_(root, 0.0, torch.inf)  # 0 becomes infinity, in one pass without a mask
        return g.div_(root).mul_(-rate_at(self.lr, at))
