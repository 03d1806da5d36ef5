"""Rules by name: different rules for different parameters, selected by their names.

    by_name({"*.bias": Sgd(0.1), "*": Sgd(0.1, weight_decay=1e-4)})

An exact name has precedence over patterns, and the first pattern that matches over later ones. Every trained parameter
must have a rule, and every rule a parameter. Torch calls this parameter groups: an optimizer with several becomes this.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor

from manyhands.core.errors import ManyhandsError, Refused, refuse_unless
from manyhands.core.rule import Rule, State, UpdateContext
from manyhands.rules.momentum import Momentum
from manyhands.rules.sgd import Sgd


@dataclass
class ByName:
    """A rule for each group of parameters: use `by_name` to make it.

    Args:
        groups: names or patterns of names, and the rule for the parameters that they match.
    """

    groups: tuple[tuple[tuple[str, ...], Rule], ...]
    elementwise: bool = field(init=False, repr=False)
    needs: frozenset[str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        rules = [rule for _, rule in self.groups]
        refuse_unless(len(rules) >= 1, "the number of rules by name", len(rules), ">= 1")
        if any(isinstance(rule, ByName) for rule in rules):
            raise Refused(f"{rules} contain rules by name, but must not: put all patterns into one by_name")
        self.elementwise = all(rule.elementwise for rule in rules)
        self.needs = frozenset[str]().union(*(rule.needs for rule in rules))

    def kind(self, parameter: str) -> int:
        """The number of the group that a parameter belongs to."""
        number = self._find(parameter)
        if number is None:
            patterns = ", ".join(pattern for names, _ in self.groups for pattern in names)
            raise Refused(f"{parameter} has no rule, but must match one of the patterns {patterns}")
        return number

    def _find(self, parameter: str) -> int | None:
        groups = [names for names, _ in self.groups]
        exact = (number for number, names in enumerate(groups) if parameter in names)
        matching = (n for n, names in enumerate(groups) if any(fnmatchcase(parameter, one) for one in names))
        return next(exact, next(matching, None))

    def chosen(self, kind: Any) -> Rule:
        """The rule of a group."""
        rule: Rule = self.groups[kind][1]
        return rule

    def check(self, parameters: Iterable[str]) -> None:
        """Refuse a rule that no parameter of the model matches: its pattern is likely a mistake."""
        used = {self._find(name) for name in parameters}
        for number, (names, rule) in enumerate(self.groups):
            if number not in used:
                raise Refused(f"{rule} is for {', '.join(names)}, but no parameter of the model has such a name")

    def init(self, weights: Tensor) -> State:
        """The states of all rules. A weight slice uses that of the rule chosen for its parameters instead."""
        states = [rule.init(weights) for _, rule in self.groups]
        return {f"{n}.{name}": x for n, state in enumerate(states) for name, x in state.items()}

    def __call__(self, g: Tensor, at: UpdateContext) -> Tensor | None:
        raise ManyhandsError("rules by name cannot be applied to a gradient without a name: use chosen(kind(name))")


def by_name(rules: Mapping[str, Rule]) -> ByName:
    """One rule of several, each for the parameters whose names match its pattern, such as `*.bias`."""
    return ByName(tuple(((pattern,), rule) for pattern, rule in rules.items()))


EXAMPLES: Mapping[str, Rule] = {"by name": by_name({"*.bias": Sgd(0.1), "*": Momentum(0.1, weight_decay=1e-4)})}
