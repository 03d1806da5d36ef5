"""A torch optimizer that somebody has made, as a rule: made again, with the same options, where the weights live.

    torch.optim.AdamW(model.parameters(), lr=0.01)    ->    Torch("AdamW", lr=0.01, betas=..., ...)

The optimizer itself is never stepped. What would be lost on the way is refused: a memory it has already, a
scheduler that changes its rate, parameters that are not the model's.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from manyhands.core.errors import Refused
from manyhands.rules.torch import Torch

_NOT_OPTIONS = frozenset({"params", "param_names"})


def recreate(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> Torch:
    """The rule that does what `optimizer` would do to these parameters of a model."""
    _refuse_strangers(optimizer, parameters)
    if any(_has_stepped(memory) for memory in optimizer.state.values()):
        raise Refused("the optimizer has already stepped, but must be new: its memory cannot be carried over")
    first, *others = [_options(group) for group in optimizer.param_groups]
    for number, options in enumerate(others, start=1):
        if unequal := [name for name in first if options[name] != first[name]]:
            name = unequal[0]
            raise Refused(
                f"{name} is {first[name]} in group 0 of the optimizer and {options[name]} in group {number}, "
                "but all groups must have the same options: one rule moves all weights"
            )
    return _rule(type(optimizer), first)


def _refuse_strangers(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
    known = {id(p): name for name, p in parameters.items()}
    given = [p for group in optimizer.param_groups for p in group["params"]]
    if strangers := [p for p in given if id(p) not in known]:
        shapes = ", ".join(str(tuple(p.shape)) for p in strangers)
        raise Refused(f"the optimizer has parameters of shape {shapes}, but must have those of the model only")
    missing = {name for name, p in parameters.items() if p.requires_grad} - {known[id(p)] for p in given}
    if missing:
        names = ", ".join(name for name in parameters if name in missing)
        raise Refused(f"the optimizer lacks {names}, but must have every parameter of the model that is to be trained")


def _has_stepped(memory: Mapping[str, Any]) -> bool:
    """Adagrad has a memory from the beginning, but counts no step in it."""
    return bool(memory) and float(memory.get("step", 1)) > 0


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    if "initial_lr" in group:
        raise Refused(
            "the optimizer has a scheduler, which would not reach the weights: "
            "give the method a rule whose lr is a function of the samples instead"
        )
    return {name: value for name, value in group.items() if name not in _NOT_OPTIONS}


def _rule(kind: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> Torch:
    """What the class takes is handed to it; what it sets by itself must come out the same."""
    knobs = {name: value for name, value in options.items() if name in inspect.signature(kind).parameters}
    again = _options(kind([nn.Parameter(torch.zeros(1, 1))], **knobs).param_groups[0])
    if unlike := [name for name in options if name not in again or again[name] != options[name]]:
        raise Refused(f"{unlike[0]} of a {kind.__name__} is {options[unlike[0]]}, but its class cannot be told that")
    return Torch(kind, **{**knobs, "lr": float(knobs["lr"])})
