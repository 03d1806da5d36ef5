"""A torch optimizer whose options are read at each step from the user's own, whichever code has changed them.

    optimizer.param_groups      [{lr, momentum, betas: (b1, b2), ...}, {...}]
    the row of their numbers    (lr, momentum, b1, b2, ...,            ...)      OptionNames: where each one is

The row is set before each step on the rank whose gradient it is (core/options.py); for a gradient that is applied
elsewhere, it comes with the gradient. Options that are no numbers (`nesterov`, `foreach`) cannot change during a run.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from manyhands.core.errors import Refused, refuse_unless
from manyhands.core.options import Options
from manyhands.core.rule import Rule, UpdateContext
from manyhands.rules.by_name import ByName
from manyhands.rules.torch import Torch
from manyhands.run.optimizer_guards import refuse_unfit, refuse_unknown

Group = Mapping[str, Any]

SCHEDULED = frozenset(
    ["params", "param_names", "initial_lr", "min_lr", "max_lr", "base_momentum", "min_momentum", "max_momentum"]
)
"""What a group has beside its options; most of it belongs to schedulers."""


class OptionNames:
    """The options of one parameter group: those that are numbers, and those that are not.

    Args:
        kind: the class of the optimizer.
        group: the parameter group.
        start: where its numbers begin in the row of all groups.
    """

    def __init__(self, kind: type[torch.optim.Optimizer], group: Group, start: int) -> None:
        takes = inspect.signature(kind).parameters
        given = {name: value for name, value in group.items() if name in takes and name != "params"}
        self.fixed = {name: value for name, value in given.items() if not _is_numeric(value)}
        self._sizes = {name: len(_numbers(value)) for name, value in given.items() if name not in self.fixed}
        refuse_unless("lr" in self._sizes, "the optimizer", kind.__name__, "one that is given a learning rate lr")
        _refuse_other_options(kind, group, given)
        self.start, self.stop = start, start + sum(self._sizes.values())

    def row(self, group: Group) -> tuple[float, ...]:
        """The numbers of the group as they are now; refused if another option has changed."""
        for name, value in self.fixed.items():
            if group[name] != value:
                raise Refused(f"{name} of the optimizer is {group[name]} now, but must stay {value} during a run")
        return tuple(number for name in self._sizes for number in _numbers(group[name]))

    def named(self, row: Sequence[float]) -> dict[str, Any]:
        """The options of this group in the row of all groups."""
        found: dict[str, Any] = {}
        at = self.start
        for name, size in self._sizes.items():
            found[name] = row[at] if size == 1 else tuple(row[at : at + size])
            at += size
        return found


def _refuse_other_options(kind: type[torch.optim.Optimizer], group: Group, given: Group) -> None:
    """Refuse options that the class does not take, unless it sets them itself or a scheduler has."""
    again = kind([nn.Parameter(torch.zeros(1, 1))], **given).param_groups[0]
    for name in group.keys() - given.keys() - SCHEDULED:
        if name not in again or again[name] != group[name]:
            raise Refused(f"{name} of a {kind.__name__} is {group[name]}, but its class has no such argument")


def _is_numeric(value: Any) -> bool:
    parts = value if isinstance(value, tuple | list) else [value]
    return bool(parts) and all(isinstance(one, int | float) and not isinstance(one, bool) for one in map(_plain, parts))


def _plain(value: Any) -> Any:
    """A number that is held in a tensor, as a number."""
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _numbers(value: Any) -> list[float]:
    return [_plain(one) for one in value] if isinstance(value, tuple | list) else [_plain(value)]


class LiveTorch(Torch):
    """A torch optimizer with options that may change at every step.

    Args:
        kind: the class.
        options: the numbers of all groups.
        names: where those of this group are.
    """

    def __init__(self, kind: type[torch.optim.Optimizer], options: Options, names: OptionNames) -> None:
        knobs = {**names.fixed, **names.named(options.values)}
        super().__init__(kind, lr=knobs.pop("lr"), **knobs)
        self._options, self._names = options, names

    def _set_options(self, group: dict[str, Any], at: UpdateContext) -> None:
        group.update(self._names.named(at.options or self._options.values))
        group["lr"] *= at.rate

    def _changes(self, name: str) -> bool:
        return name not in self._names.fixed


class LiveOptimizers:
    """The rule that updates a model as the user's optimizers would, with their options at every step.

    Args:
        optimizers: the user's own; they are read, and never stepped.
        parameters: those of the model, by name.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], parameters: Mapping[str, nn.Parameter]) -> None:
        refuse_unknown(optimizers, parameters)
        refuse_unfit(optimizers, parameters)
        self._optimizers = optimizers
        self._names: list[OptionNames] = []
        for kind, group in self._groups():
            start = self._names[-1].stop if self._names else 0
            self._names.append(OptionNames(kind, group, start))
        self.options = Options(self.row())
        self.rule = self._rule({id(p): name for name, p in parameters.items()})

    def _groups(self) -> list[tuple[type[torch.optim.Optimizer], Group]]:
        return [(type(one), group) for one in self._optimizers for group in one.param_groups]

    def read(self) -> tuple[float, ...]:
        """Let the rule use the numbers of all groups as they are now."""
        self.options.values = self.row()
        return self.options.values

    def row(self) -> tuple[float, ...]:
        """The numbers of all groups as they are now."""
        groups = self._groups()
        bound = f"{len(self._names)}, as at the beginning"
        refuse_unless(len(groups) == len(self._names), "the number of parameter groups", len(groups), bound)
        rows = [names.row(group) for names, (_, group) in zip(self._names, groups, strict=True)]
        return tuple(number for row in rows for number in row)

    def _rule(self, known: Mapping[int, str]) -> Rule:
        rules = [
            (tuple(known[id(p)] for p in group["params"]), LiveTorch(kind, self.options, names))
            for (kind, group), names in zip(self._groups(), self._names, strict=True)
            if group["params"]
        ]
        return rules[0][1] if len(rules) == 1 else ByName(tuple(rules))
