"""Rules in a row: what one returns is the gradient of the next, what the last returns is the step.

    g -> first -> g' -> second -> g'' -> last -> step

Every link but the last must therefore give a gradient (uphill), such as a delay compensation does. A link that gives
a step (downhill, times η) is for the end of the row. The state of link i is kept under "i.", such as "0.m".

Reference: the idea of chained gradient transformations is that of optax, https://github.com/google-deepmind/optax.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import Tensor

from manyhands.core.errors import Refused, refuse_unless
from manyhands.core.protocols import At, Rule, State


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

    def init(self, weights: Tensor) -> State:
        """The states of all links under their numbers."""
        return {f"{i}.{name}": x for i, rule in enumerate(self.links) for name, x in rule.init(weights).items()}

    def __call__(self, g: Tensor, at: At) -> Tensor | None:
        *first, last = range(len(self.links))
        for i in first:
            given = self._apply(i, g, at)
            if given is None:
                raise Refused(f"rule {i} of a chain moved the weights itself, but only the last (rule {last}) may")
            g = given
        return self._apply(last, g, at)

    def _apply(self, i: int, g: Tensor, at: At) -> Tensor | None:
        own = {name.removeprefix(f"{i}."): x for name, x in at.state.items() if name.startswith(f"{i}.")}
        step = self.links[i](g, replace(at, state=own))
        at.state.update({f"{i}.{name}": x for name, x in own.items()})
        return step


def chain(*rules: Rule) -> Chain:
    """One rule out of several, applied in this order."""
    return Chain(rules)
