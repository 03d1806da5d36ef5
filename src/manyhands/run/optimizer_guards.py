"""Guards of a user's optimizer whose steps the method takes: what cannot be carried over, or has no effect, is refused.

parameters      all those that are trained, and no others; no memory of earlier steps
state_dict()    the memory is where the weights are: use hands.save and hands.load
step()          in a loop of hands.step, which takes the steps
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from manyhands.core.errors import Refused

ELSEWHERE = "the memory of the optimizer is where the method keeps the weights, and not in this object"


def refuse_unfit(optimizers: Sequence[torch.optim.Optimizer], parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse optimizers that have a memory of earlier steps, or lack a parameter that is to be trained."""
    if any(_has_stepped(memory) for optimizer in optimizers for memory in optimizer.state.values()):
        raise Refused("the optimizer has already stepped, but must be new: its state cannot be carried over")
    given = {id(p) for p in _given(optimizers)}
    if missing := [name for name, p in parameters.items() if p.requires_grad and id(p) not in given]:
        names = ", ".join(missing)
        raise Refused(f"the optimizer lacks {names}, but must have every parameter of the model that is to be trained")


def _given(optimizers: Sequence[torch.optim.Optimizer]) -> list[nn.Parameter]:
    return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]


def _has_stepped(memory: Mapping[str, Any]) -> bool:
    """Whether its state is that of a step; Adagrad has a state before the first one, in which `step` is 0."""
    return bool(memory) and float(memory.get("step", 1)) > 0


def refuse_unknown(optimizers: Sequence[torch.optim.Optimizer], parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse optimizers of parameters that the model does not have."""
    known = {id(p) for p in parameters.values()}
    if unknown := [p for p in _given(optimizers) if id(p) not in known]:
        shapes = ", ".join(str(tuple(p.shape)) for p in unknown)
        raise Refused(f"the optimizer has parameters of shape {shapes}, but must have those of the model only")


def refuse_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that is to do something at its steps, of which it will take none."""
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise Refused("the optimizer has hooks on its steps, but must have none: it is never stepped itself")


# -- while it is in use --------------------------------------------------------------------------------


def guard_state(optimizer: torch.optim.Optimizer) -> list[RemovableHandle]:
    """Refuse to load a state as long as the handles remain, and to read one that is empty."""

    def refuse_loading(_: torch.optim.Optimizer, state: Any) -> None:
        raise Refused(f"optimizer.load_state_dict() was called, but {ELSEWHERE}: use hands.load(path)")

    optimizer.register_state_dict_pre_hook(_refuse_reading)
    return [optimizer.register_load_state_dict_pre_hook(refuse_loading)]


def _refuse_reading(optimizer: torch.optim.Optimizer) -> None:
    """Remains after the end: an optimizer that has then stepped by itself has a state of its own."""
    if not any(map(_has_stepped, optimizer.state.values())):
        raise Refused(f"optimizer.state_dict() was called, but {ELSEWHERE}: use hands.save(path)")


def guard_steps(optimizer: torch.optim.Optimizer) -> list[RemovableHandle]:
    """Refuse steps of an optimizer that `hands.step` reads, as long as the handles remain."""

    def refuse_step(*_: Any) -> None:
        raise Refused("optimizer.step() was called, but hands.step takes the steps: for a loop with both use prepare")

    optimizer._opt_called = True  # type: ignore[attr-defined]  # else schedulers warn that it has taken no step
    return [*guard_state(optimizer), optimizer.register_step_pre_hook(refuse_step)]
