"""Recipe: what a strategy was made of, as plain data: its name in the catalog and the knobs that were given."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

Strategy = TypeVar("Strategy")


@dataclass(frozen=True)
class Recipe:
    """A name and its knobs; `spelled` is how somebody wrote it, if they wrote it."""

    name: str
    knobs: Mapping[str, Any] = field(default_factory=dict)
    spelled: str | None = None

    def __str__(self) -> str:
        knobs = ",".join(f"{name}={value}" for name, value in self.knobs.items())
        return self.spelled or (f"{self.name}:{knobs}" if knobs else self.name)


def recipe_of(strategy: object) -> Recipe:
    """Where a strategy comes from; one that was put together by hand is called by its kind."""
    found = getattr(strategy, "recipe", None)
    return found if isinstance(found, Recipe) else Recipe(type(strategy).__name__)


def spelled(strategy: Strategy, words: str) -> Strategy:
    """The same strategy, under another name."""
    other = copy.copy(strategy)
    other.recipe = replace(recipe_of(strategy), spelled=words)  # type: ignore[attr-defined]
    return other
