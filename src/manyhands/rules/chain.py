"""Rules in a row: what one returns is the gradient of the next, what the last returns is the step.

    g -> first -> g' -> second -> g'' -> last -> step

A link that corrects a gradient gives a gradient again (it says `uphill`), such as a delay compensation does; one that
asks how late it is (it says `corrects`) sees each gradient before several are averaged. What makes
a step of it (downhill, times η) comes after all of these, and a link that corrects a step, such as a decay, after that.
The state of link i is kept under "i.", such as "0.m". A link may be another one for some parameters (`Chooses`).

Reference: the idea of chained gradient transformations is that of optax, https://github.com/google-deepmind/optax.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from torch import Tensor

from manyhands.core.errors import Refused, refuse_unless
from manyhands.core.holding import skips
from manyhands.core.protocols import At, Chooses, Remembers, Rule, State


@dataclass
class Chain:
    """What `chain` makes.

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
        self._first = len(list(takewhile(lambda link: getattr(link, "corrects", False), self.links[:-1])))

    @property
    def corrects(self) -> bool:
        """Whether it begins with links that look at each gradient by itself, before any mean."""
        return self._first > 0

    def can_skip(self) -> bool:
        """Whether no gradient is no step: if it is none for any link."""
        return all(skips(link) for link in self.links)

    def kind(self, parameter: str) -> Hashable:
        """What kind of parameter it is to each link that chooses."""
        return tuple(link.kind(parameter) for link in self.links if isinstance(link, Chooses))

    def chosen(self, kind: Any) -> Rule:
        """The chain with the links chosen for such parameters."""
        kinds = iter(kind)
        links = tuple(link.chosen(next(kinds)) if isinstance(link, Chooses) else link for link in self.links)
        return replace(self, links=links) if kind else self

    def check(self, parameters: Iterable[str]) -> None:
        """As the links that choose do."""
        for link in self.links:
            if isinstance(link, Chooses):
                link.check(parameters)

    def init(self, weights: Tensor) -> State:
        """The states of all links under their numbers."""
        return {f"{i}.{name}": x for i, rule in enumerate(self.links) for name, x in rule.init(weights).items()}

    def __call__(self, g: Tensor, at: At) -> Tensor | None:
        return self.step(self.correct(g, at), at)

    def correct(self, g: Tensor, at: At) -> Tensor:
        """What the first links make of one gradient, if they must see it alone."""
        return self._in_turn(range(self._first), g, at)

    def step(self, g: Tensor, at: At) -> Tensor | None:
        """What the others make of it, or of the mean of several."""
        *others, last = range(self._first, len(self.links))
        return self._apply(last, self._in_turn(others, g, at), at)

    def _in_turn(self, numbers: Iterable[int], g: Tensor, at: At) -> Tensor:
        for i in numbers:
            given = self._apply(i, g, at)
            if given is None:
                last = len(self.links) - 1
                raise Refused(f"rule {i} of a chain moved the weights itself, but only the last (rule {last}) may")
            g = given
        return g

    def _apply(self, i: int, g: Tensor, at: At) -> Tensor | None:
        own = _own(i, at.state)
        step = self.links[i](g, replace(at, state=own))
        at.state.update({f"{i}.{name}": x for name, x in own.items()})
        return step

    def memory_of(self, weights: Tensor) -> State:
        """What those links remember that keep their memory themselves."""
        found: State = {}
        for i, rule in enumerate(self.links):
            if isinstance(rule, Remembers):
                found |= {f"{i}.{name}": x for name, x in rule.memory_of(weights).items()}
            elif "owner" in rule.needs:
                raise Refused(f"{rule} keeps its memory to itself, but must be able to hand it over to be saved")
        return found

    def remember(self, weights: Tensor, state: State) -> None:
        """Give it back to them."""
        known = {f"{i}": rule for i, rule in enumerate(self.links) if isinstance(rule, Remembers)}
        if strange := sorted(name for name in state if name.partition(".")[0] not in known):
            raise Refused(f"{', '.join(strange)} was saved, but no rule of {self} remembers such a thing")
        for i, rule in known.items():
            rule.remember(weights, _own(i, state))


def _own(i: int | str, state: State) -> State:
    """The state of link i, under its own names."""
    return {name.removeprefix(f"{i}."): x for name, x in state.items() if name.startswith(f"{i}.")}


def chain(*rules: Rule) -> Chain:
    """One rule out of several, applied in this order."""
    return Chain(rules)


def with_step(rule: Rule, step: Rule) -> Rule:
    """`rule` with another way to make a step: the links that correct the gradient before it stay."""
    before = takewhile(lambda link: getattr(link, "uphill", False), rule.links if isinstance(rule, Chain) else ())
    links = (*before, step)
    return step if len(links) == 1 else Chain(links)
