"""A torch optimizer as a rule: it is made again, with the same options, on the rank that has the weights.

    torch.optim.AdamW(model.parameters(), lr=0.01)    ->    Torch("AdamW", lr=0.01, betas=..., ...)
    torch.optim.AdamW([group, another], lr=0.01)      ->    ByName: one Torch for each group, if their options differ

The optimizer itself is never stepped. What cannot be carried over is refused: state of earlier steps, a scheduler that
changes its rate, hooks on its steps, parameters that are not the model's.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from manyhands.core.errors import Refused, refuse_unless
from manyhands.core.rule import Rule
from manyhands.rules.by_name import ByName
from manyhands.rules.torch import Torch

_NOT_OPTIONS = frozenset({"params", "param_names"})


def recreate(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> Rule:
    """The rule that updates these parameters of a model as `optimizer` would."""
    refuse_unknown([optimizer], parameters)
    refuse_unfit([optimizer], parameters)
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise Refused("the optimizer has hooks on its steps, but must have none: it is never stepped itself")
    known = {id(p): name for name, p in parameters.items()}
    found: list[tuple[dict[str, Any], list[str]]] = []
    for group in optimizer.param_groups:
        options, names = _options(group), [known[id(p)] for p in group["params"]]
        same = [others for known_options, others in found if known_options == options]
        if same:
            same[0].extend(names)
        elif names:
            found.append((options, names))
    rules = [(tuple(names), _rule(type(optimizer), options)) for options, names in found]
    return rules[0][1] if len(rules) == 1 else ByName(tuple(rules))


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


def refuse_unknown(optimizers: Sequence[torch.optim.Optimizer], parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse optimizers of parameters that the model does not have."""
    known = {id(p) for p in parameters.values()}
    if unknown := [p for p in _given(optimizers) if id(p) not in known]:
        shapes = ", ".join(str(tuple(p.shape)) for p in unknown)
        raise Refused(f"the optimizer has parameters of shape {shapes}, but must have those of the model only")


def _has_stepped(memory: Mapping[str, Any]) -> bool:
    """Whether its state is that of a step; Adagrad has a state before the first one, in which `step` is 0."""
    return bool(memory) and float(memory.get("step", 1)) > 0


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    if "initial_lr" in group:
        raise Refused(
            "the optimizer has a scheduler, which would not reach the weights: "
            "give the method a rule whose lr is a function of the samples instead"
        )
    return {name: value for name, value in group.items() if name not in _NOT_OPTIONS}


def _rule(kind: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> Torch:
    """The class with the options that it takes; the others, which it sets itself, must have the same values."""
    knobs = {name: value for name, value in options.items() if name in inspect.signature(kind).parameters}
    refuse_unless("lr" in knobs, "the optimizer", kind.__name__, "one that is given a learning rate lr")
    again = _options(kind([nn.Parameter(torch.zeros(1, 1))], **knobs).param_groups[0])
    if different := [name for name in options if name not in again or again[name] != options[name]]:
        raise Refused(
            f"{different[0]} of a {kind.__name__} is {options[different[0]]}, but its class has no such argument"
        )
    return Torch(kind, **{**knobs, "lr": float(knobs["lr"])})
