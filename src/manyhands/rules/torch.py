"""Any optimizer of `torch.optim` as a rule: it moves the weights itself.

    the optimizer sees one parameter, which shares its memory with the weights, and the gradient as its `.grad`

Reference: https://docs.pytorch.org/docs/stable/optim.html.

Where we differ: the memory of the optimizer stays inside it, one optimizer per weights tensor, and is not part of the
rule's state: the weights need one owner (a shard in shared memory has none, so the shard is kept by a rank instead).
A checkpoint asks for it (`memory_of`) and gives it back (`remember`), under the name of its class: "AdamW.exp_avg".
Copies and pickles of a rule start fresh. Prefer our own `Sgd`, `Momentum`, `Adagrad`, `RmsProp` and `Adam` where they
do.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from manyhands.core.errors import ManyhandsError, Refused, refuse_unless
from manyhands.core.protocols import At, State
from manyhands.rules.rate import Rate, check_rate, rate_at

if TYPE_CHECKING:
    from torch.optim import Optimizer

ELEMENTWISE = frozenset(
    ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "Rprop", "ASGD"]
)
"""The classes of torch.optim that treat each coordinate alone."""

NUMBER = ":number"
NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}
"""How a number of an optimizer's state is saved, and under a name with which ending."""

UNFIT = {
    "LBFGS": "one that needs no closure: LBFGS evaluates the loss again within a step",
    "SparseAdam": "one for dense gradients: SparseAdam takes only sparse ones, ours are flat vectors",
}


class Torch:
    """A torch optimizer.

    Args:
        kind: a class such as `torch.optim.AdamW`, or its name: "AdamW".
        lr: η, or a function samples -> η.
        knobs: whatever else the class takes.
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
        """A fresh optimizer for these weights; its memory is its own."""
        w = torch.nn.Parameter(weights.detach())
        η = rate_at(self.lr, At(weights))
        try:  # the first optimizer a process makes takes torch a second: it imports its compiler
            self._optimizers[weights.data_ptr(), weights.shape] = self.kind([w], lr=η, **self.knobs)
        except ValueError as error:
            raise Refused(f"{self} does not take a parameter of shape {tuple(weights.shape)}: {error}") from error
        return {}

    def __call__(self, g: Tensor, at: At) -> None:
        optimizer = self._of(at.weights)
        group = optimizer.param_groups[0]
        group["lr"] = rate_at(self.lr, at)
        (w,) = group["params"]
        w.grad = g
        optimizer.step()
        w.grad = None

    def _of(self, weights: Tensor) -> Optimizer:
        optimizer = self._optimizers.get((weights.data_ptr(), weights.shape))
        if optimizer is None:
            raise ManyhandsError("a Torch rule was given weights that it was not initialised with")
        return optimizer

    def memory_of(self, weights: Tensor) -> State:
        """The optimizer's state; plain numbers become tensors under a name that says so."""
        optimizer = self._of(weights)
        _refuse_changed(optimizer)
        (w,) = optimizer.param_groups[0]["params"]
        memory, kind = optimizer.state.get(w, {}), type(optimizer).__name__
        kept = {f"{kind}.{name}": value for name, value in memory.items() if value is not None}
        return {_key(name, value): _tensor(name, value) for name, value in kept.items()}

    def remember(self, weights: Tensor, state: State) -> None:
        """Put a saved state in the place of the optimizer's own."""
        optimizer = self._of(weights)
        (w,) = optimizer.param_groups[0]["params"]
        for name, value in state.items():
            kind, _, key = name.partition(".")
            mine = type(optimizer).__name__
            refuse_unless(kind == mine, "the optimizer", mine, f"{kind}, whose memory was saved")
            number = key.endswith(NUMBER)
            optimizer.state[w][key.removesuffix(NUMBER)] = value.item() if number else value.clone()


def _key(name: str, value: Any) -> str:
    return name if isinstance(value, Tensor) else name + NUMBER


def _tensor(name: str, value: Any) -> Tensor:
    """What is remembered, as a tensor that gives back the very same number."""
    if isinstance(value, Tensor):
        return value
    if type(value) not in NUMBERS:
        raise Refused(
            f"{name} of the optimizer is a {type(value).__name__}, but must be a tensor or a number to be saved"
        )
    return torch.tensor(value, dtype=NUMBERS[type(value)])


def _refuse_changed(optimizer: Optimizer) -> None:
    """Refuse an optimizer that remembers things among its options, where we do not look."""
    for name, value in optimizer.param_groups[0].items():
        given = value if name in ("params", "lr") else optimizer.defaults.get(name, value)
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
