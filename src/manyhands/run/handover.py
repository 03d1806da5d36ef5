"""Handover: no step. The mean gradient is left where it is, for an optimizer of the user's own.

    mean gradient  ->  p.grad  ->  the user clips, scales, looks at it  ->  optimizer.step()

For methods whose workers all have the same weights and the same mean gradient: then each can take the step itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from manyhands.core.rule import State, UpdateContext


@dataclass(frozen=True)
class Handover:
    """A rule that does not move the weights."""

    elementwise = True
    needs = frozenset({"replica"})

    def init(self, weights: Tensor) -> State:
        """No state."""
        return {}

    def __call__(self, g: Tensor, at: UpdateContext) -> None:
        """The user's optimizer will move the weights."""

    def can_move(self, weights: Tensor) -> bool:
        return True

    def move(self, g: Tensor, at: UpdateContext, into: Tensor | None) -> None:
        """The user's optimizer will move the weights."""
