"""Nesterov's accelerated gradient: heavy ball that looks one step ahead.

    m <- μ m + (g + λ w)
    step = -η (g + λ w + μ m)

Reference: Y. Nesterov, "A method of solving a convex programming problem with convergence rate O(1/k²)", 1983;
I. Sutskever et al., "On the importance of initialization and momentum in deep learning", 2013,
https://proceedings.mlr.press/v28/sutskever13.html. Equal to `torch.optim.SGD(momentum=μ, nesterov=True)`.

Where we differ: as usual in deep learning, the weights are the look-ahead point, so that the gradient is evaluated
once; μ is a constant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from manyhands.core.rule import Rule, Twins
from manyhands.rules.momentum import Momentum


@dataclass(frozen=True)
class Nesterov(Momentum):
    """`Momentum` in which `nesterov` is always on."""

    nesterov: bool = field(default=True, init=False)


EXAMPLES: Mapping[str, Rule] = {"nesterov": Nesterov(0.1, 0.9, weight_decay=0.01)}
TWINS: Twins = {"nesterov": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01})}
