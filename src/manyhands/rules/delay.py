"""Links for stale gradients: they correct a gradient that was computed at old weights, or reduce it.

    w   the weights now       w_k  the weights worker k computed g at       τ  staleness: updates in between

    DelayCompensation   g + λ g² (w - w_k)              λ = λ0, or adaptive: λ0 / √(s + ε),  s <- m s + (1 - m) g²
    StalenessAware      g / max(1, τ)
    AgeAware            g / (τ + 1)
    AdaptiveDamping     g / (1 + (w - w_k)² / γ)

All are elementwise and give a gradient, so they are links of a chain before the one that makes the step; momentum,
decay and clipping follow them. If several gradients make one update, each is corrected before they are averaged.

Reference: S. Zheng et al., "Asynchronous Stochastic Gradient Descent with Delay Compensation", 2017,
https://arxiv.org/abs/1609.08326; W. Zhang, S. Gupta, X. Lian, J. Liu, "Staleness-aware Async-SGD", 2016,
https://arxiv.org/abs/1511.05950; J. Jiang, B. Cui, C. Zhang, L. Yu, "Heterogeneity-aware Distributed Parameter
Servers" (DynSGD), 2017, https://doi.org/10.1145/3035918.3035933; J. Hermans, "On Scalable Deep Learning and
Parallelizing Gradient Descent" (ADAG), 2017.

Where we differ: DC-ASGD may have one mean square s for all workers, as published, or one for each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from manyhands.core.errors import refuse_unless
from manyhands.core.rule import Rule, State, UpdateContext

SEEN = frozenset({"seen"})


def drift(at: UpdateContext) -> Tensor:
    """w - w_k, in a new tensor."""
    assert at.seen is not None, "the rule needs the weights that the gradient was computed at"
    return at.weights - at.seen


@dataclass(frozen=True)
class DelayCompensation:
    """The gradient at the current weights, to first order: g(w) ≈ g(w_k) + H (w - w_k) with λ g² for the Hessian H.

    Args:
        strength: λ0; 0 does not change gradients.
        adaptive: divide λ0 by the root of the mean square, so that it does not depend on the size of gradients.
        decay: m, the decay of the mean square.
        eps: ε, added under the root.
        mean_squares: how many mean squares there are; worker k uses number k modulo this. 1: one for all workers;
            the number of workers: one for each.
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

    def __call__(self, g: Tensor, at: UpdateContext) -> Tensor:
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
    """A gradient of staleness τ is divided by τ; one of staleness 0 is not changed."""

    elementwise = True
    uphill = True
    corrects = True
    needs = frozenset[str]()

    def init(self, weights: Tensor) -> State:
        """No state."""
        return {}

    def __call__(self, g: Tensor, at: UpdateContext) -> Tensor:
        return g.div_(at.lag) if at.lag > 1 else g


@dataclass(frozen=True)
class AgeAware:
    """A gradient is divided by τ + 1, the age of its weights in updates once it has been applied."""

    elementwise = True
    uphill = True
    corrects = True
    needs = frozenset[str]()

    def init(self, weights: Tensor) -> State:
        """No state."""
        return {}

    def __call__(self, g: Tensor, at: UpdateContext) -> Tensor:
        return g.div_(at.lag + 1) if at.lag else g


@dataclass(frozen=True)
class AdaptiveDamping:
    """A gradient is reduced in the coordinates that other workers have moved since its weights were read.

    Args:
        gamma: γ, the squared distance at which a coordinate is halved; infinity: no damping.
    """

    gamma: float

    elementwise = True
    uphill = True
    corrects = True
    needs = SEEN

    def __post_init__(self) -> None:
        refuse_unless(self.gamma > 0, "gamma", self.gamma, "> 0")

    def init(self, weights: Tensor) -> State:
        """No state."""
        return {}

    def __call__(self, g: Tensor, at: UpdateContext) -> Tensor:
        d = drift(at)
        return g.div_(d.mul_(d).div_(self.gamma).add_(1))


EXAMPLES: Mapping[str, Rule] = {
    "delay compensation": DelayCompensation(0.5),
    "delay compensation, adaptive": DelayCompensation(0.5, adaptive=True, mean_squares=3),
    "staleness aware": StalenessAware(),
    "age aware": AgeAware(),
    "adaptive damping": AdaptiveDamping(2.0),
}
