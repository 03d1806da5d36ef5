"""Links for gradients that come late: what was computed at old weights is corrected, or counts for less.

    w   the weights now       w_k  what worker k had read when it computed g       τ  updates in between

    DelayCompensation   g + λ g² (w - w_k)              λ = λ0, or adaptive: λ0 / √(s + ε),  s <- m s + (1 - m) g²
    StalenessAware      g / max(1, τ)
    AgeAware            g / (τ + 1)
    AdaptiveDamping     g / (1 + (w - w_k)² / γ)

All are element by element and give a gradient, so they stand in a chain before what makes the step of it; momentum,
decay and clipping come after them. Of several gradients that make one update each is corrected by itself.

Reference: S. Zheng et al., "Asynchronous Stochastic Gradient Descent with Delay Compensation", 2017,
https://arxiv.org/abs/1609.08326; W. Zhang, S. Gupta, X. Lian, J. Liu, "Staleness-aware Async-SGD", 2016,
https://arxiv.org/abs/1511.05950; J. Jiang, B. Cui, C. Zhang, L. Yu, "Heterogeneity-aware Distributed Parameter
Servers" (DynSGD), 2017, https://doi.org/10.1145/3035918.3035933; J. Hermans, "On Scalable Deep Learning and
Parallelizing Gradient Descent" (ADAG), 2017.

Where we differ: the mean square s of DC-ASGD may be one for all workers, as published, or one for each.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from manyhands.core.errors import refuse_unless
from manyhands.core.protocols import At, State

SEEN = frozenset({"seen"})


def drift(at: At) -> Tensor:
    """How far the weights have gone since the gradient's worker read them, in memory of its own."""
    assert at.seen is not None, "whoever holds the weights must say what a gradient was computed at"
    return at.weights - at.seen


@dataclass(frozen=True)
class DelayCompensation:
    """What the gradient would be now, to first order: g(w) ≈ g(w_k) + H (w - w_k) with λ g² for the curvature H.

    Args:
        strength: λ0, how much of it; 0 leaves gradients as they are.
        adaptive: divide λ0 by the root of the recent mean square, so that it is the same for large and small gradients.
        decay: m, how long the mean square remembers.
        eps: ε, added under the root.
        mean_squares: how many mean squares are kept; worker k's gradients go to number k modulo this. 1: one for all,
            as many as there are workers: one for each.
    """

    strength: float = 0.04
    adaptive: bool = False
    decay: float = 0.95
    eps: float = 1e-7
    mean_squares: int = 1

    elementwise = True
    uphill = True
    corrects = True
    needs = SEEN

    def __post_init__(self) -> None:
        refuse_unless(0 <= self.strength < inf, "strength", self.strength, ">= 0 and finite")
        refuse_unless(0 <= self.decay < 1, "decay", self.decay, ">= 0 and < 1")
        refuse_unless(self.eps > 0, "eps", self.eps, "> 0")
        refuse_unless(self.mean_squares >= 1, "mean_squares", self.mean_squares, ">= 1")

    def init(self, weights: Tensor) -> State:
        """s, the mean squares."""
        return {f"s{n}": torch.zeros_like(weights) for n in range(self.mean_squares)} if self.adaptive else {}

    def __call__(self, g: Tensor, at: At) -> Tensor:
        λ, m = self.strength, self.decay
        if not λ:
            return g
        hg = drift(at).mul_(g)
        if self.adaptive:
            s = at.state[f"s{at.rank % self.mean_squares}"].mul_(m).addcmul_(g, g, value=1 - m)
            hg.div_((s + self.eps).sqrt_())
        return g.addcmul_(hg, g, value=λ)


@dataclass(frozen=True)
class StalenessAware:
    """A gradient of staleness τ counts 1/τ; one of staleness 0 or 1 counts in full."""

    elementwise = True
    uphill = True
    corrects = True
    needs = frozenset[str]()

    def init(self, weights: Tensor) -> State:
        """Nothing to remember."""
        return {}

    def __call__(self, g: Tensor, at: At) -> Tensor:
        return g.div_(at.lag) if at.lag > 1 else g


@dataclass(frozen=True)
class AgeAware:
    """A gradient counts 1/(τ + 1): so many updates old are its weights once it is applied itself."""

    elementwise = True
    uphill = True
    corrects = True
    needs = frozenset[str]()

    def init(self, weights: Tensor) -> State:
        """Nothing to remember."""
        return {}

    def __call__(self, g: Tensor, at: At) -> Tensor:
        return g.div_(at.lag + 1) if at.lag else g


@dataclass(frozen=True)
class AdaptiveDamping:
    """A gradient counts less in those coordinates that others have moved meanwhile.

    Args:
        gamma: γ, the square of the distance at which a coordinate counts half; infinity: never.
    """

    gamma: float

    elementwise = True
    uphill = True
    corrects = True
    needs = SEEN

    def __post_init__(self) -> None:
        refuse_unless(self.gamma > 0, "gamma", self.gamma, "> 0")

    def init(self, weights: Tensor) -> State:
        """Nothing to remember."""
        return {}

    def __call__(self, g: Tensor, at: At) -> Tensor:
        d = drift(at)
        return g.div_(d.mul_(d).div_(self.gamma).add_(1))
