"""Rule: how is an update applied? The contract of a function from gradient to step, and its optional methods."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

State = dict[str, Tensor]
"""The memory of a rule: tensors shaped like the weights, so that they can be cut like them."""


@dataclass(slots=True)
class UpdateContext:
    """Where and when a rule is applied."""

    weights: Tensor
    state: State = field(default_factory=dict)
    updates: int = 1
    """The number of this update of the weights, from 1."""
    samples: int = 0
    """Samples that the run had consumed before this update, without those of its own gradients: 0 at the first one.
    Schedules are functions of this. A shard counts those of the gradients that it has applied or dropped; a worker that
    updates weights of its own takes the other workers to be as far as itself."""
    lag: int = 0
    """Staleness: updates of these weights since its worker read them, not counting this one."""
    rank: int = 0
    """The worker whose gradient it is; of several merged ones the lowest."""
    count: int = 1
    """Of how many gradients this one is the mean, or the sum if gradients are not merged."""
    workers: int = 1
    """How many workers send gradients for these weights, asynchronously or together."""
    seen: Tensor | None = None
    """The weights the gradient was computed at, if the rule needs them."""
    rate: float = 1.0
    """A factor of the learning rate, set by the method."""
    options: tuple[float, ...] = ()
    """The numbers of the worker's optimizer (core/options.py), if they came with the gradient."""


class Rule(Protocol):
    """How is an update applied? A function from gradient to step, applied by the rank that has the weights.

    `OPTIONAL` lists the methods that only some rules have.
    """

    elementwise: bool
    """Whether the weights may be cut anywhere without changing the result."""
    needs: frozenset[str]
    """What it requires: "seen" (the weights a gradient was computed at), "owner" (its memory is not in the state, so
    one process must apply all updates), "replica" (every worker must see the whole gradient)."""

    def init(self, weights: Tensor) -> State:
        """The fresh state for these weights."""

    def __call__(self, g: Tensor, at: UpdateContext) -> Tensor | None:
        """The step to add to `at.weights`; None if the rule has moved them itself. May overwrite `g`."""


OPTIONAL = {
    "can_move": "Moves: whether it can move these weights itself",
    "move": "Moves: add the step to the weights, in one pass over memory",
    "can_skip": "Skips: whether a gradient of 0 is a step of 0",
    "scale": "Scales: the number that the gradient is multiplied with",
    "uphill": "Uphill: whether it gives a gradient and not a step",
    "corrects": "PerGradient: whether it must see each gradient before they are averaged",
    "correct": "Corrects: the corrected gradient",
    "step": "Corrects: the rest of the rule, applied to the mean of corrected gradients",
    "kind": "Chooses: which group a parameter belongs to",
    "chosen": "Chooses: the rule for a group of parameters",
    "check": "Chooses: refuse a group that no parameter of the model belongs to",
    "memory_of": "Remembers: the memory that is not in the state",
    "remember": "Remembers: restore that memory",
    "outcome": "LooksAhead: the weights to evaluate",
}
"""The methods and attributes that only some rules have. A contract test refuses a public name that is in neither list,
since a misspelled optional method would never be called."""


@runtime_checkable
class Moves(Protocol):
    """A rule that can also move weights itself in one pass over memory, with bit-identical results."""

    def can_move(self, weights: Tensor) -> bool:
        """Whether it can, with its knobs and these weights."""

    def move(self, g: Tensor, at: UpdateContext, into: Tensor | None) -> None:
        """w <- w + rule(g), and a copy of the new weights `into` other memory; `g` is only read."""


@runtime_checkable
class Skips(Protocol):
    """A rule for which a gradient of 0 may be a step of 0, so that a sparse gradient changes only its own rows.

    Its state must not change without a gradient either: a fading sum, a decay or a running mean does.
    """

    def can_skip(self) -> bool:
        """Whether this holds with its knobs."""


def skips(rule: Rule) -> bool:
    """Whether a gradient of 0 is a step of 0."""
    return isinstance(rule, Skips) and rule.can_skip()


@runtime_checkable
class Scales(Protocol):
    """A rule whose step, if it skips, is the gradient times a number."""

    def scale(self, at: UpdateContext) -> float:
        """That number: -eta."""


def scales(rule: Rule) -> bool:
    """Whether a step is the gradient times a number, so that the model can apply it itself (`Descends`)."""
    return skips(rule) and isinstance(rule, Scales)


@runtime_checkable
class Uphill(Protocol):
    """A link of a chain that gives a gradient again, and not a step."""

    uphill: bool


@runtime_checkable
class PerGradient(Protocol):
    """A rule that may have to see each gradient before several are averaged."""

    corrects: bool


@runtime_checkable
class Corrects(PerGradient, Protocol):
    """A rule that corrects each gradient, then makes a step of their mean."""

    def correct(self, g: Tensor, at: UpdateContext) -> Tensor:
        """The gradient that enters the mean; may overwrite `g`."""

    def step(self, g: Tensor, at: UpdateContext) -> Tensor | None:
        """The rest of the rule, applied to the mean."""


def corrects(rule: Rule) -> bool:
    """Whether a rule corrects each gradient before they are averaged."""
    return isinstance(rule, Corrects) and rule.corrects


@runtime_checkable
class Chooses(Protocol):
    """A rule that is a different one for some of the parameters (see core/param_groups.py)."""

    def kind(self, parameter: str) -> Hashable:
        """The group of a parameter; all parameters of a group have the same rule."""

    def chosen(self, kind: Any) -> Rule:
        """The rule for all parameters of a group."""

    def check(self, parameters: Iterable[str]) -> None:
        """Refuse a group that no parameter of this model belongs to."""


@runtime_checkable
class Remembers(Protocol):
    """A rule with a memory that is not in its state ("owner" in `needs`), but can be saved and restored."""

    def memory_of(self, weights: Tensor) -> State:
        """Its memory of these weights; tensors that are not shaped like them cannot be cut."""

    def remember(self, weights: Tensor, state: State) -> None:
        """Restore its memory of these weights; refused if it is not a memory of this rule."""


@runtime_checkable
class LooksAhead(Protocol):
    """An outer rule whose weights are not the ones to evaluate, such as a Nesterov look-ahead."""

    def outcome(self, at: UpdateContext) -> Tensor:
        """The weights to evaluate and to save."""


Twins = Mapping[str, tuple[str, Mapping[str, Any]]]
"""For examples of rules by name the class of torch.optim, and its arguments, that they must equal."""
