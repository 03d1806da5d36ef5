"""Recipe: how a strategy was made, as plain data: its name in the catalog and the knobs that were given."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

Strategy = TypeVar("Strategy")


@dataclass(frozen=True)
class Recipe:
    """A name and its knobs; `spelled` is the text it was read from, if it was read from one."""

    name: str
    knobs: Mapping[str, Any] = field(default_factory=dict)
    spelled: str | None = None

    def __str__(self) -> str:
        knobs = ",".join(f"{name}={value}" for name, value in self.knobs.items())
        return self.spelled or (f"{self.name}:{knobs}" if knobs else self.name)


def recipe_of(strategy: object) -> Recipe:
    """The recipe of a strategy; one that was not made by the catalog is named after its class."""
    recipe = getattr(strategy, "recipe", None)
    return recipe if isinstance(recipe, Recipe) else Recipe(type(strategy).__name__)


def spelled(strategy: Strategy, text: str) -> Strategy:
    """A copy of the strategy whose recipe is printed as `text`."""
    other = copy.copy(strategy)
    other.recipe = replace(recipe_of(strategy), spelled=text)  # type: ignore[attr-defined]
    return other
