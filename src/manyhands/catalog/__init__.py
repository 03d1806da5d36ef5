"""The methods by their names in the literature, each a recipe of a few lines. A family's `__all__` lists its methods.

The strategy that a recipe makes carries the recipe's name and the given knobs, for records and tables.
"""

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any

from manyhands.catalog import (
    asynchronous,
    batch,
    compressed,
    delayed,
    local,
    peers,
    pipelines,
    quorum,
    slices,
    stale,
    synchronous,
)
from manyhands.catalog.asynchronous import *  # noqa: F403
from manyhands.catalog.batch import *  # noqa: F403
from manyhands.catalog.compressed import *  # noqa: F403
from manyhands.catalog.delayed import *  # noqa: F403
from manyhands.catalog.local import *  # noqa: F403
from manyhands.catalog.peers import *  # noqa: F403
from manyhands.catalog.pipelines import *  # noqa: F403
from manyhands.catalog.quorum import *  # noqa: F403
from manyhands.catalog.slices import *  # noqa: F403
from manyhands.catalog.stale import *  # noqa: F403
from manyhands.catalog.synchronous import *  # noqa: F403
from manyhands.core.recipe import Recipe

__all__ = [
    *asynchronous.__all__,
    *batch.__all__,
    *compressed.__all__,
    *delayed.__all__,
    *local.__all__,
    *peers.__all__,
    *pipelines.__all__,
    *quorum.__all__,
    *slices.__all__,
    *stale.__all__,
    *synchronous.__all__,
]


def _signed(recipe: Callable[..., Any]) -> Callable[..., Any]:
    """The recipe, setting `recipe` on every strategy it makes."""

    @wraps(recipe)
    def make(*given: Any, **named: Any) -> Any:
        strategy = recipe(*given, **named)
        knobs = signature(recipe).bind(*given, **named).arguments
        strategy.recipe = Recipe(recipe.__name__.replace("_", "-"), dict(knobs))
        return strategy

    return make


globals().update({name: _signed(globals()[name]) for name in __all__})
