"""Policies: which weights the passes of a mini-batch see, and which weights an update moves.

    F(m)   leaves, version = forward(m, seen)     seen: the version that came with the activation, None on stage 0
    B(m)   backward(m)                            those leaves now hold what B is to see
    U(m)   lag = done(m); moves(m); updated(m)    the caller makes the update itself

Autograd keeps activations by value and weights by reference. So the leaves of F(m) may be written to before B(m) as
long as their version counters do not change: B(m) then combines the activations of F(m) with other weights. A policy
that does so has `rewrites`; derived weights (derived.py) are refused with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from manyhands.core.declared_state import RuleState, StateParts
from manyhands.core.flat import Flat
from manyhands.core.rule import Rule
from manyhands.core.vector_ops import VectorOps
from manyhands.core.weight_slice import WeightSlice, replica_slices


@dataclass
class StageWeights:
    """What a policy needs to know of a stage.

    Args:
        flat: the live weights.
        live: the parameters of the stage, views of them, in the order of the slots.
        rule: how the weights are updated.
        ops: the vector operations of this rank.
        index: s, the number of the stage.
        stages: K, how many there are.
        every: how many mini-batches an update has.
        begun: how many updates there have been before.
    """

    flat: Flat
    live: list[Tensor]
    rule: Rule
    ops: VectorOps
    index: int = 0
    stages: int = 1
    every: int = 1
    begun: int = 0

    def slices(self, weights: Sequence[Tensor] | None = None) -> list[WeightSlice]:
        """Slices with a fresh state of the rule: of the live weights, or of other memory."""
        return replica_slices(self.ops, self.flat, self.rule, weights)

    def copy(self) -> list[Tensor]:
        """The live weights in new memory, one tensor per dtype group."""
        return [self.ops.clone(group.weights) for group in self.flat.groups]

    def leaves(self, memory: Sequence[Tensor]) -> list[Tensor]:
        """Parameters in other memory, which can be written without changing their version counters."""
        views = [memory[p.span.group][p.span.start : p.span.stop].view(p.shape) for p in self.flat.slots]
        return [view.data.requires_grad_() for view in views]


class Versions:
    """The live weights, updated in place, and how many updates there were between F(m) and U(m)."""

    rewrites = False
    """Whether the weights of F(m) are written to before B(m)."""

    def __init__(self, stage: StageWeights) -> None:
        self.stage = stage
        self.slices = stage.slices()
        self.version = stage.begun
        self.used: dict[int, int] = {}
        """The version that F(m) saw, by mini-batch in flight."""

    def forward(self, m: int, seen: int | None) -> tuple[list[Tensor], int | None]:
        """The weights for F(m), and the version that travels on with its activation, if any."""
        self.used[m] = self.version
        return self.stage.live, None

    def backward(self, m: int) -> None:
        """Before B(m): let the weights of F(m) hold what B(m) is to see."""

    def moves(self, m: int) -> list[WeightSlice]:
        """What the update after B(m) moves."""
        return self.slices

    def updated(self, m: int) -> None:
        """The update after B(m) has been made."""
        self.version += 1

    def done(self, m: int) -> int:
        """Mini-batch `m` is about to be in an update: by how many updates the weights of F(m) are behind."""
        return self.version - self.used.pop(m)

    def settle(self) -> None:
        """Nothing is in flight: let the live weights be the outcome."""

    @property
    def kept(self) -> int:
        """How many versions of the weights there are, the live one too."""
        return 1

    @property
    def others(self) -> Sequence[Tensor]:
        """The memory of all versions but the live one."""
        return ()

    def state(self) -> StateParts:
        """What a checkpoint must hold besides the live weights."""
        return {"rule": RuleState(self.stage.flat.slots, self.slices, "divided")}
