"""Methods by their text: `ssp:staleness=3` becomes the strategy that `mh.ssp(staleness=3)` makes."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from manyhands import catalog
from manyhands.core.errors import Refused
from manyhands.core.method_index import Method
from manyhands.core.method_text import read_knobs
from manyhands.core.part_text import PartSpec
from manyhands.core.recipe import recipe_of, spelled
from manyhands.core.strategy import Strategy


def strategy_of(text: str) -> Strategy:
    """The strategy that a text names; it keeps the text as its name."""
    return spelled(build(*read_knobs(text)), text)


def build(method: Method, knobs: Mapping[str, Any]) -> Strategy:
    """The strategy that a recipe makes of its knobs; it keeps the text in which they were given."""
    recipe = getattr(catalog, method.function)
    strategy: Strategy = recipe(
        **{name: knob.build() if isinstance(knob, PartSpec) else knob for name, knob in knobs.items()}
    )
    text = ",".join(f"{name}={knob}" for name, knob in knobs.items())
    return spelled(strategy, f"{method.name}:{text}" if text else method.name)


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
