"""Links that clip gradients, by value or by norm.

    ClipValue   g <- min(max(g, -c), c)           coordinate by coordinate
    ClipNorm    g <- g min(1, c / (|g| + ε))      |g|: Euclidean norm of one parameter's gradient; ε = 1e-6

Reference: R. Pascanu, T. Mikolov, Y. Bengio, "On the difficulty of training recurrent neural networks", 2013,
https://arxiv.org/abs/1211.5063. Equal to `torch.nn.utils.clip_grad_value_`, and to `clip_grad_norm_` called for each
parameter.

Where we differ: the norm is that of one parameter, never of the whole model. Updates are applied slice by slice, on
different ranks, and none of them has the whole gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Literal

import torch
from torch import Tensor

from manyhands.core.errors import Refused, refuse_unless
from manyhands.core.rule import Rule, State, UpdateContext

EPS = 1e-6


@dataclass(frozen=True)
class ClipValue:
    """Each coordinate of a gradient is clamped to a limit.

    Args:
        limit: c.
    """

    limit: float

    elementwise = True
    uphill = True
    needs = frozenset[str]()

    def __post_init__(self) -> None:
        refuse_unless(0 < self.limit < inf, "limit", self.limit, "> 0 and finite")

    def init(self, weights: Tensor) -> State:
        """No state."""
        return {}

    def can_skip(self) -> bool:
        """Always: 0 is not clipped."""
        return True

    def __call__(self, g: Tensor, at: UpdateContext) -> Tensor:
        return g.clamp_(-self.limit, self.limit)


@dataclass(frozen=True)
class ClipNorm:
    """The norm of each parameter's gradient is clamped to a limit; its direction does not change.

    Args:
        limit: c.
        of: whose norm it is; only "parameter" is possible.
    """

    limit: float
    of: Literal["parameter", "model"] = "parameter"

    elementwise = False
    uphill = True
    needs = frozenset[str]()

    def __post_init__(self) -> None:
        refuse_unless(0 < self.limit < inf, "limit", self.limit, "> 0 and finite")
        if self.of != "parameter":
            raise Refused(
                f"of is {self.of!r}, but must be 'parameter': updates are applied slice by slice, "
                "and no rank has the gradient of the whole model"
            )

    def init(self, weights: Tensor) -> State:
        """No state."""
        return {}

    def __call__(self, g: Tensor, at: UpdateContext) -> Tensor:
        return g.mul_((self.limit / (torch.linalg.vector_norm(g) + EPS)).clamp_(max=1))


EXAMPLES: Mapping[str, Rule] = {"clip by value": ClipValue(0.5), "clip by norm": ClipNorm(2.0)}
