"""Methods by their text: `ssp:staleness=3` becomes the strategy that `mh.ssp(staleness=3)` makes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from manyhands import catalog
from manyhands.core.method_index import Method
from manyhands.core.method_text import read_knobs
from manyhands.core.part_text import PartSpec
from manyhands.core.recipe import spelled
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
