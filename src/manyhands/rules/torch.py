"""Any optimizer of `torch.optim` as a rule: it moves the weights itself.

    the optimizer has one parameter, which shares its memory with the weights, and the gradient as its `.grad`

Reference: https://docs.pytorch.org/docs/stable/optim.html.

Where we differ: the memory of the optimizer stays inside it, one optimizer per weights tensor, and is not part of the
rule's state: one process must own the weights (so a rank serves a shard that would otherwise be in shared memory).
A checkpoint saves it (`memory_of`) and restores it (`remember`) with its class in the name: "AdamW.exp_avg". Copies and
pickles of a rule start fresh. Prefer our own `Sgd`, `Momentum`, `Adagrad`, `RmsProp` and `Adam`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from manyhands.core.errors import ManyhandsError, Refused, refuse_unless
from manyhands.core.rule import Rule, State, Twins, UpdateContext
from manyhands.rules.rate import Rate, check_rate, rate_at
from manyhands.rules.schedules import StepDecay

if TYPE_CHECKING:
    from torch.optim import Optimizer

ELEMENTWISE = frozenset(
    ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "Rprop", "ASGD"]
)
"""The classes of torch.optim whose updates are elementwise."""

NUMBER = ":number"
NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}
"""The dtype in which a number of an optimizer's state is saved, under a name with this ending."""

UNFIT = {
    "LBFGS": "one that needs no closure: LBFGS evaluates the loss again within a step",
    "SparseAdam": "one for dense gradients: SparseAdam takes only sparse ones, but gradients are flat vectors here",
}


class Torch:
    """A torch optimizer.

    Args:
        kind: a class such as `torch.optim.AdamW`, or its name: "AdamW".
        lr: η, or a function samples -> η.
        knobs: the other arguments of the class.
    """

    def __init__(self, kind: Callable[..., Optimizer] | str, *, lr: Rate, **knobs: Any) -> None:
        check_rate(lr)
        self.kind, self.lr, self.knobs = _find(kind), lr, knobs
        inspect.signature(self.kind).bind([], lr=lr, **knobs)  # a misspelt knob is a TypeError now, not at the start
        self.elementwise = any(self.kind is getattr(torch.optim, name) for name in ELEMENTWISE)
        self.needs = frozenset({"owner"})
        self._optimizers: dict[tuple[int, torch.Size], Optimizer] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_optimizers": {}}

    def __repr__(self) -> str:
        knobs = "".join(f", {name}={value!r}" for name, value in self.knobs.items())
        return f"Torch({getattr(self.kind, '__name__', self.kind)}, lr={self.lr!r}{knobs})"

    def init(self, weights: Tensor) -> State:
        """A fresh optimizer for these weights, and no state."""
        w = torch.nn.Parameter(weights.detach())
        η = rate_at(self.lr, UpdateContext(weights))
        try:  # the first optimizer a process makes takes torch a second: it imports its compiler
            self._optimizers[weights.data_ptr(), weights.shape] = self.kind([w], lr=η, **self.knobs)
        except ValueError as error:
            raise Refused(f"{self} does not take a parameter of shape {tuple(weights.shape)}: {error}") from error
        return {}

    def __call__(self, g: Tensor, at: UpdateContext) -> None:
        optimizer = self._of(at.weights)
        group = optimizer.param_groups[0]
        self._set_options(group, at)
        (w,) = group["params"]
        w.grad = g
        optimizer.step()
        w.grad = None

    def _changes(self, name: str) -> bool:
        """Whether the run changes this option, so that its value need not be saved with the memory."""
        return name == "lr"

    def _set_options(self, group: dict[str, Any], at: UpdateContext) -> None:
        """Set the options that change during a run."""
        group["lr"] = rate_at(self.lr, at)

    def _of(self, weights: Tensor) -> Optimizer:
        optimizer = self._optimizers.get((weights.data_ptr(), weights.shape))
        if optimizer is None:
            raise ManyhandsError("a Torch rule was applied to weights that it was not initialised with")
        return optimizer

    def memory_of(self, weights: Tensor) -> State:
        """The optimizer's state; numbers become tensors, and their names get an ending."""
        optimizer = self._of(weights)
        _refuse_changed(optimizer, self._changes)
        (w,) = optimizer.param_groups[0]["params"]
        memory, kind = optimizer.state.get(w, {}), type(optimizer).__name__
        values = {f"{kind}.{name}": value for name, value in memory.items() if value is not None}
        return {_key(name, value): _tensor(name, value) for name, value in values.items()}

    def remember(self, weights: Tensor, state: State) -> None:
        """Replace the optimizer's state by a saved one."""
        optimizer = self._of(weights)
        (w,) = optimizer.param_groups[0]["params"]
        for name, value in state.items():
            kind, dot, key = name.partition(".")
            mine = type(optimizer).__name__
            was = f"{kind}, whose memory was saved" if dot else f"the rule whose memory {name!r} was saved"
            refuse_unless(kind == mine, "the optimizer", mine, was)
            number = key.endswith(NUMBER)
            optimizer.state[w][key.removesuffix(NUMBER)] = value.item() if number else value.clone()


def _key(name: str, value: Any) -> str:
    return name if isinstance(value, Tensor) else name + NUMBER


def _tensor(name: str, value: Any) -> Tensor:
    """A value of the state as a tensor, from which the same number is restored."""
    if isinstance(value, Tensor):
        return value
    if type(value) not in NUMBERS:
        raise Refused(
            f"{name} of the optimizer is a {type(value).__name__}, but must be a tensor or a number to be saved"
        )
    return torch.tensor(value, dtype=NUMBERS[type(value)])


def _refuse_changed(optimizer: Optimizer, changes: Callable[[str], bool]) -> None:
    """Refuse an optimizer that changes its own options, which are not saved."""
    for name, value in optimizer.param_groups[0].items():
        given = value if name == "params" or changes(name) else optimizer.defaults.get(name, value)
        if value is not given and value != given:
            raise Refused(
                f"the optimizer has moved its own {name} to {value}, but must leave it at {given} to be saved"
            )


def _find(kind: Callable[..., Optimizer] | str) -> Callable[..., Optimizer]:
    name = kind if isinstance(kind, str) else getattr(kind, "__name__", "")
    refuse_unless(name not in UNFIT, "the optimizer", name, UNFIT.get(name, ""))
    if not isinstance(kind, str):
        return kind
    refuse_unless(hasattr(torch.optim, kind), "the optimizer", kind, "a class of torch.optim")
    found: Callable[..., Optimizer] = getattr(torch.optim, kind)
    return found


EXAMPLES: Mapping[str, Rule] = {
    "torch class": Torch(torch.optim.NAdam, lr=0.01),
    "torch by name": Torch("AdamW", lr=0.01, weight_decay=0.1),
    "torch with a schedule": Torch("SGD", lr=StepDecay(0.1, 200), momentum=0.9),
    "torch, not elementwise": Torch("Adafactor", lr=0.01),
}
TWINS: Twins = {
    "torch class": ("NAdam", {"lr": 0.01}),
    "torch by name": ("AdamW", {"lr": 0.01, "weight_decay": 0.1}),
    "torch with a schedule": ("SGD", {"lr": StepDecay(0.1, 200), "momentum": 0.9}),
    "torch, not elementwise": ("Adafactor", {"lr": 0.01}),
}
