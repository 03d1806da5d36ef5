"""Links that keep gradients from being too large.

    ClipValue   g <- min(max(g, -c), c)           coordinate by coordinate
    ClipNorm    g <- g min(1, c / (|g| + ε))      |g|: Euclidean norm of one parameter's gradient; ε = 1e-6

Reference: R. Pascanu, T. Mikolov, Y. Bengio, "On the difficulty of training recurrent neural networks", 2013,
https://arxiv.org/abs/1211.5063. Equal to `torch.nn.utils.clip_grad_value_`, and to `clip_grad_norm_` called for each
parameter.

Where we differ: the norm is that of one parameter, never of the whole model. Weights are moved stretch by stretch, by
whoever keeps them, and nobody there knows the rest of the gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal

import torch
from torch import Tensor

from manyhands.core.errors import Refused, refuse_unless
from manyhands.core.protocols import At, State

EPS = 1e-6


@dataclass(frozen=True)
class ClipValue:
    """No coordinate of a gradient is larger than a limit.

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
        """Nothing to remember."""
        return {}

    def can_skip(self) -> bool:
        """0 is never too large."""
        return True

    def __call__(self, g: Tensor, at: At) -> Tensor:
        return g.clamp_(-self.limit, self.limit)


@dataclass(frozen=True)
class ClipNorm:
    """No parameter's gradient is longer than a limit; it keeps its direction.

    Args:
        limit: c.
        of: whose norm it is; only a parameter's can be known here.
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
                f"of is {self.of!r}, but must be 'parameter': weights are moved stretch by stretch, "
                "and whoever moves one does not know the gradient of the whole model"
            )

    def init(self, weights: Tensor) -> State:
        """Nothing to remember."""
        return {}

    def __call__(self, g: Tensor, at: At) -> Tensor:
        return g.mul_((self.limit / (torch.linalg.vector_norm(g) + EPS)).clamp_(max=1))
