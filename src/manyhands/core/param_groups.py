"""Parameter groups: some parameters may have another update rule than others, such as one without weight decay.

    rule         decays                     does not
    groups     [ fc1.weight | fc2.weight ] [ fc1.bias | fc2.bias ]       parameters of one kind are adjacent
    slices       each is within one group, so it has one rule

A rule that treats parameters differently implements `Chooses`. The flat model is laid out by kinds, and each weight
slice takes the rule chosen for its group; collectives, servers and strategies need not know of it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from torch import nn

from manyhands.core.errors import Refused
from manyhands.core.rule import Chooses, Rule
from manyhands.core.strategy import HasRule, Strategy


def rule_of(strategy: Strategy) -> Rule | None:
    """The update rule of a strategy; None if it has none."""
    return strategy.rule if isinstance(strategy, HasRule) else None


def groups(rule: Rule | None, model: nn.Module) -> list[list[str]]:
    """The names of the trained parameters of a model, grouped by kind; no groups if the rule makes no difference."""
    if not isinstance(rule, Chooses):
        return []
    named = dict(model.named_parameters())
    rule.check(named)
    by_kind: dict[Hashable, list[str]] = {}
    for name in (name for name, p in named.items() if p.requires_grad):
        by_kind.setdefault(rule.kind(name), []).append(name)
    return list(by_kind.values())


def rule_for(rule: Rule, parameters: Iterable[str]) -> Rule:
    """The one rule for these parameters; refused if they have several."""
    if not isinstance(rule, Chooses):
        return rule
    kinds = {rule.kind(name): name for name in parameters}
    if len(kinds) != 1:
        raise Refused(
            f"{' and '.join(kinds.values())} are in one group, but must not be: {rule} treats them differently"
        )
    return rule.chosen(*kinds)
