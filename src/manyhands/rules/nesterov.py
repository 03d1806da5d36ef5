"""Nesterov's accelerated gradient: heavy ball that looks one step ahead.

    m <- μ m + (g + λ w)
    step = -η (g + λ w + μ m)

Reference: Y. Nesterov, "A method of solving a convex programming problem with convergence rate O(1/k²)", 1983;
I. Sutskever et al., "On the importance of initialization and momentum in deep learning", 2013,
https://proceedings.mlr.press/v28/sutskever13.html. Equal to `torch.optim.SGD(momentum=μ, nesterov=True)`.

Where we differ: as everywhere in this field, the weights we keep are the point ahead, so that the gradient needs no
second evaluation; μ is a constant.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from manyhands.rules.momentum import Momentum


@dataclass(frozen=True)
class Nesterov(Momentum):
    """`Momentum` with `nesterov` switched on for good."""

    nesterov: bool = field(default=True, init=False)
