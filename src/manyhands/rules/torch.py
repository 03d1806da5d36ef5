"""Any optimizer of `torch.optim` as a rule: it moves the weights itself.

    the optimizer sees one parameter, which shares its memory with the weights, and the gradient as its `.grad`

Reference: https://docs.pytorch.org/docs/stable/optim.html.

Where we differ: the memory of the optimizer stays inside it, one optimizer per weights tensor, and is not part of the
rule's state: it is not saved, and the weights need one owner (a shard in shared memory has none, so the shard is kept
by a rank instead). Copies and pickles of a rule start fresh. Prefer our
own `Sgd`, `Momentum`, `Adagrad`, `RmsProp` and `Adam` where they do.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from manyhands.core.errors import ManyhandsError, refuse_unless
from manyhands.core.protocols import At, State
from manyhands.rules.rate import Rate, check_rate, rate_at

if TYPE_CHECKING:
    from torch.optim import Optimizer

ELEMENTWISE = frozenset(
    ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "Rprop", "ASGD"]
)
"""The classes of torch.optim that treat each coordinate alone."""

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

    def init(self, weights: Tensor) -> State:
        """A fresh optimizer for these weights; its memory is its own."""
        w = torch.nn.Parameter(weights.detach())
        η = rate_at(self.lr, At(weights))
        # the first optimizer a process makes takes torch a second: it imports its compiler
        self._optimizers[weights.data_ptr(), weights.shape] = self.kind([w], lr=η, **self.knobs)
        return {}

    def __call__(self, g: Tensor, at: At) -> None:
        optimizer = self._optimizers.get((at.weights.data_ptr(), at.weights.shape))
        if optimizer is None:
            raise ManyhandsError("a Torch rule was given weights that it was not initialised with")
        group = optimizer.param_groups[0]
        group["lr"] = rate_at(self.lr, at)
        (w,) = group["params"]
        w.grad = g
        optimizer.step()
        w.grad = None


def _find(kind: Callable[..., Optimizer] | str) -> Callable[..., Optimizer]:
    name = kind if isinstance(kind, str) else getattr(kind, "__name__", "")
    refuse_unless(name not in UNFIT, "the optimizer", name, UNFIT.get(name, ""))
    if not isinstance(kind, str):
        return kind
    refuse_unless(hasattr(torch.optim, kind), "the optimizer", kind, "a class of torch.optim")
    found: Callable[..., Optimizer] = getattr(torch.optim, kind)
    return found
