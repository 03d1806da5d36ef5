"""Rules in a row: what one returns is the gradient of the next, what the last returns is the step.

    g -> first -> g' -> second -> g'' -> last -> step

First come links that correct a gradient and give a gradient again (`uphill`), such as a clip or a delay compensation;
those that depend on the staleness (`corrects`) are applied to each gradient before several are averaged. Then comes the
link that makes a step of it (downhill, times η), and then links that change a step, such as a decay. The state of link
i is stored under "i.", such as "0.m". A link may be a different rule for some parameters (`Chooses`).

Reference: the idea of chained gradient transformations is that of optax, https://github.com/google-deepmind/optax.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from torch import Tensor

from manyhands.core.errors import Refused, refuse_unless
from manyhands.core.rule import (
    Chooses,
    PerGradient,
    Remembers,
    Rule,
    State,
    Twins,
    UpdateContext,
    Uphill,
    skips,
)
from manyhands.rules.adam import Adam
from manyhands.rules.clip import ClipValue
from manyhands.rules.decay import WeightDecay
from manyhands.rules.delay import StalenessAware
from manyhands.rules.schedules import StepDecay
from manyhands.rules.sgd import Sgd


@dataclass
class Chain:
    """Several rules as one: use `chain` to make it.

    Args:
        links: the rules, first to last.
    """

    links: tuple[Rule, ...]
    elementwise: bool = field(init=False)
    needs: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        refuse_unless(len(self.links) >= 1, "the number of rules in a chain", len(self.links), ">= 1")
        self.elementwise = all(rule.elementwise for rule in self.links)
        self.needs = frozenset[str]().union(*(rule.needs for rule in self.links))
        per_gradient = takewhile(lambda link: isinstance(link, PerGradient) and link.corrects, self.links[:-1])
        self._first = len(list(per_gradient))

    @property
    def corrects(self) -> bool:
        """Whether it begins with links that are applied to each gradient before they are averaged."""
        return self._first > 0

    def can_skip(self) -> bool:
        """Whether a gradient of 0 stays 0 in every link."""
        return all(skips(link) for link in self.links)

    def kind(self, parameter: str) -> Hashable:
        """The group of a parameter in each link that chooses."""
        return tuple(link.kind(parameter) for link in self.links if isinstance(link, Chooses))

    def chosen(self, kind: Any) -> Rule:
        """The chain with the links for the parameters of this group."""
        kinds = iter(kind)
        links = tuple(link.chosen(next(kinds)) if isinstance(link, Chooses) else link for link in self.links)
        return replace(self, links=links) if kind else self

    def check(self, parameters: Iterable[str]) -> None:
        """Refuse a group of a link that no parameter belongs to."""
        for link in self.links:
            if isinstance(link, Chooses):
                link.check(parameters)

    def init(self, weights: Tensor) -> State:
        """The states of all links, prefixed by their numbers."""
        return {f"{i}.{name}": x for i, rule in enumerate(self.links) for name, x in rule.init(weights).items()}

    def __call__(self, g: Tensor, at: UpdateContext) -> Tensor | None:
        return self.step(self.correct(g, at), at)

    def correct(self, g: Tensor, at: UpdateContext) -> Tensor:
        """Apply the links that correct a single gradient."""
        return self._in_turn(range(self._first), g, at)

    def step(self, g: Tensor, at: UpdateContext) -> Tensor | None:
        """Apply the other links, to one gradient or to the mean of several."""
        *others, last = range(self._first, len(self.links))
        return self._apply(last, self._in_turn(others, g, at), at)

    def _in_turn(self, numbers: Iterable[int], g: Tensor, at: UpdateContext) -> Tensor:
        for i in numbers:
            given = self._apply(i, g, at)
            if given is None:
                last = len(self.links) - 1
                raise Refused(f"rule {i} of a chain moved the weights itself, but only the last (rule {last}) may")
            g = given
        return g

    def _apply(self, i: int, g: Tensor, at: UpdateContext) -> Tensor | None:
        own = _own(i, at.state)
        step = self.links[i](g, replace(at, state=own))
        at.state.update({f"{i}.{name}": x for name, x in own.items()})
        return step

    def memory_of(self, weights: Tensor) -> State:
        """The memories of links that are not in their state."""
        found: State = {}
        for i, rule in enumerate(self.links):
            if isinstance(rule, Remembers):
                found |= {f"{i}.{name}": x for name, x in rule.memory_of(weights).items()}
            elif "owner" in rule.needs:
                raise Refused(f"{rule} keeps its state to itself, but must be able to hand it over to be saved")
        return found

    def remember(self, weights: Tensor, state: State) -> None:
        """Restore the memories of those links."""
        known = {f"{i}": rule for i, rule in enumerate(self.links) if isinstance(rule, Remembers)}
        if unknown := sorted(name for name in state if name.partition(".")[0] not in known):
            raise Refused(f"{', '.join(unknown)} was saved, but no rule of {self} remembers such a thing")
        for i, rule in known.items():
            rule.remember(weights, _own(i, state))


def _own(i: int | str, state: State) -> State:
    """The state of link i, without the prefix."""
    return {name.removeprefix(f"{i}."): x for name, x in state.items() if name.startswith(f"{i}.")}


def chain(*rules: Rule) -> Chain:
    """One rule of several, applied in this order."""
    return Chain(rules)


def with_step(rule: Rule, step: Rule) -> Rule:
    """`rule` with another link that makes the step, after the same links that correct a gradient."""
    links = rule.links if isinstance(rule, Chain) else ()
    links = (*takewhile(lambda link: isinstance(link, Uphill) and link.uphill, links), step)
    return step if len(links) == 1 else Chain(links)


EXAMPLES: Mapping[str, Rule] = {
    "chain of one": chain(Adam(0.01)),
    "adamw as a chain": chain(Adam(0.01), WeightDecay(0.1, 0.01)),
    "adamw as a chain with a schedule": chain(Adam(StepDecay(0.1, 200)), WeightDecay(0.1, StepDecay(0.1, 200))),
    "chain that corrects each gradient": chain(StalenessAware(), ClipValue(0.5), Sgd(0.1)),
    "chain that skips": chain(ClipValue(0.5), Sgd(0.1)),
}
TWINS: Twins = {
    "chain of one": ("Adam", {"lr": 0.01}),
    "adamw as a chain": ("AdamW", {"lr": 0.01, "weight_decay": 0.1}),
    "adamw as a chain with a schedule": ("AdamW", {"lr": StepDecay(0.1, 200), "weight_decay": 0.1}),
}
