"""Choosing: some parameters may be moved by another rule than the others, such as one without weight decay.

    rule       decays                     does not
    parts    [ fc1.weight | fc2.weight ] [ fc1.bias | fc2.bias ]       parameters of one kind lie together
    holdings   each lies within one part, so it has one rule

A rule that makes such differences says so (`Chooses`). A flat model is laid out by its kinds, and each holding takes
the rule that is chosen for its part. Nobody in between has to know.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from torch import nn

from manyhands.core.errors import Refused
from manyhands.core.protocols import Applies, Chooses, Rule, Strategy


def rule_of(strategy: Strategy) -> Rule | None:
    """What moves the weights; None if there is no such rule."""
    return strategy.rule if isinstance(strategy, Applies) else None


def groups(rule: Rule | None, model: nn.Module) -> list[list[str]]:
    """The names of a model's parameters that are to be trained, those of one kind together."""
    if not isinstance(rule, Chooses):
        return []
    named = dict(model.named_parameters())
    rule.check(named)
    found: dict[Hashable, list[str]] = {}
    for name in (name for name, p in named.items() if p.requires_grad):
        found.setdefault(rule.kind(name), []).append(name)
    return list(found.values())


def rule_for(rule: Rule, parameters: Iterable[str]) -> Rule:
    """The rule that moves all of these; refused if they have several."""
    if not isinstance(rule, Chooses):
        return rule
    kinds = {rule.kind(name): name for name in parameters}
    if len(kinds) != 1:
        raise Refused(f"{' and '.join(kinds.values())} lie together, but must not: {rule} moves them differently")
    return rule.chosen(*kinds)
