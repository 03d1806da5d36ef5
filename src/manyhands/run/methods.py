"""Methods by their text: `ssp:staleness=3` becomes the strategy that `mh.ssp(staleness=3)` makes."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from manyhands import catalog
from manyhands.core import part_text
from manyhands.core.errors import Refused
from manyhands.core.method_index import Method
from manyhands.core.method_text import read_knobs, with_team
from manyhands.core.part_text import PartSpec
from manyhands.core.recipe import recipe_of, spelled
from manyhands.core.strategy import Strategy
from manyhands.core.team import Team
from manyhands.strategies.grid import Grid


def strategy_of(text: str) -> Strategy:
    """The strategy that a text names; it keeps the text as its name."""
    return spelled(build(*read_knobs(text)), text)


def build(method: Method, knobs: Mapping[str, Any]) -> Strategy:
    """The strategy that a recipe makes of its knobs; it keeps the text in which they were given."""
    recipe = getattr(catalog, method.function)
    built = {name: knob.build() if isinstance(knob, PartSpec) else knob for name, knob in knobs.items()}
    team = built.pop("team", None)
    text = ",".join(f"{name}={knob}" for name, knob in knobs.items())
    return spelled(over_team(recipe(**built), team), f"{method.name}:{text}" if text else method.name)


def over_team(strategy: Strategy, team: Team | str | None) -> Strategy:
    """The method with a team of ranks as each of its workers; its text names the team."""
    if team is None:
        return strategy
    recipe, why = recipe_of(strategy), strategy.traits.needs_whole_model
    if why:
        raise Refused(f"{recipe.name} cannot be trained over teams of ranks: {why}")
    made: Team = part_text.read(team, "Team").build() if isinstance(team, str) else team
    grid = Grid(strategy, made)
    grid.recipe = recipe  # type: ignore[attr-defined]
    return spelled(grid, with_team(str(recipe), str(team)))


def chosen_strategy(given: Strategy | str | None, override: str | None, *, says: bool) -> Strategy:
    """The method of a script: the launcher's `override`, else the script's own; `says` which, if they differ."""
    if override is None:
        if given is None:
            raise Refused(
                "join was given no method, but needs one: mh.join('ssp:staleness=3'), mh.join(strategy=mh.ssp()), "
                "or manyhands run --method ssp script.py"
            )
        return strategy_of(given) if isinstance(given, str) else given
    own = given if isinstance(given, str) or given is None else str(recipe_of(given))
    if says and own not in (None, override):
        print(f"manyhands: --method {override} replaces the script's own, {own}", file=sys.stderr, flush=True)
    return strategy_of(override)
