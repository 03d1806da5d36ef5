"""One rule for some parameters, another one for others, by their names.

    by_name({"*.bias": Sgd(0.1), "*": Sgd(0.1, weight_decay=1e-4)})

The first pattern that fits a name counts, and a name itself before any pattern. Every trained parameter must have a
rule, and every rule a parameter. It is what torch calls parameter groups: an optimizer that has several becomes this.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor

from manyhands.core.errors import ManyhandsError, Refused, refuse_unless
from manyhands.core.protocols import At, Rule, State


@dataclass
class ByName:
    """What `by_name` makes.

    Args:
        groups: names or patterns of names, and the rule for those whom they fit.
    """

    groups: tuple[tuple[tuple[str, ...], Rule], ...]
    elementwise: bool = field(init=False, repr=False)
    needs: frozenset[str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        rules = [rule for _, rule in self.groups]
        refuse_unless(len(rules) >= 1, "the number of rules by name", len(rules), ">= 1")
        if any(isinstance(rule, ByName) for rule in rules):
            raise Refused(f"{rules} have rules by name among them, but must be plain: give them all in one")
        self.elementwise = all(rule.elementwise for rule in rules)
        self.needs = frozenset[str]().union(*(rule.needs for rule in rules))

    def kind(self, parameter: str) -> int:
        """The number of its group."""
        number = self._find(parameter)
        if number is None:
            patterns = ", ".join(pattern for names, _ in self.groups for pattern in names)
            raise Refused(f"{parameter} has no rule, but must have one of those by name: {patterns}")
        return number

    def _find(self, parameter: str) -> int | None:
        groups = [names for names, _ in self.groups]
        exact = (number for number, names in enumerate(groups) if parameter in names)
        fitting = (n for n, names in enumerate(groups) if any(fnmatchcase(parameter, one) for one in names))
        return next(exact, next(fitting, None))

    def chosen(self, kind: Any) -> Rule:
        """The rule of a group."""
        rule: Rule = self.groups[kind][1]
        return rule

    def check(self, parameters: Iterable[str]) -> None:
        """Every rule must have a parameter; one that has none was meant for somebody."""
        used = {self._find(name) for name in parameters}
        for number, (names, rule) in enumerate(self.groups):
            if number not in used:
                raise Refused(f"{rule} is for {', '.join(names)}, but no parameter of the model is called so")

    def init(self, weights: Tensor) -> State:
        """What all of them remember; whoever holds weights asks the rule that is chosen for these."""
        states = [rule.init(weights) for _, rule in self.groups]
        return {f"{n}.{name}": x for n, state in enumerate(states) for name, x in state.items()}

    def __call__(self, g: Tensor, at: At) -> Tensor | None:
        raise ManyhandsError("rules by name were given a gradient without a name: ask for the chosen one")


def by_name(rules: Mapping[str, Rule]) -> ByName:
    """One rule out of several, each for the parameters whose names fit its pattern, such as `*.bias`."""
    return ByName(tuple(((pattern,), rule) for pattern, rule in rules.items()))
