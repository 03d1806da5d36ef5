"""Tuning: every method gets the same small budget to choose its learning rate.

rate x 0.3    rate x 1    rate x 3        a quarter of a run each, with the first seed; the best outcome is kept
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

from manyhands import catalog
from manyhands.core.recipe import recipe_of, spelled
from manyhands.core.strategy import Strategy
from manyhands.report.measures import totals
from manyhands.report.reading import RecordedRun

RATES = (0.3, 1.0, 3.0)
"""The factors of a method's learning rate that are tried."""
SHORT = 1 / 4
"""The share of a run for which a learning rate is tried."""

Trial = Callable[[Strategy, float, str], RecordedRun]
"""Runs a strategy for a share of the whole length; the text names the trial."""


def tuned(strategies: Sequence[Strategy], trial: Trial) -> tuple[list[Strategy], str]:
    """Each strategy with the best of some learning rates, and a note for the report that says which."""
    found, rates = [], []
    for strategy in strategies:
        rate = _rate(strategy)
        if rate is None:
            found.append(strategy)
            rates.append(f"{recipe_of(strategy)} has none of its own")
        else:
            best = min((rate * factor for factor in RATES), key=lambda tried: _badness(_try(strategy, tried, trial)))
            found.append(_with_rate(strategy, best))
            rates.append(f"{recipe_of(strategy)} {best:g}")
    factors = ", ".join(f"{factor:g}" for factor in RATES)
    about = f"the given rate or the default, times {factors}; {SHORT:.0%} of a run each, with the first seed"
    return found, f"Learning rates were chosen for every method with the same budget ({about}): {'; '.join(rates)}."


def _try(strategy: Strategy, rate: float, trial: Trial) -> RecordedRun:
    return trial(_with_rate(strategy, rate), SHORT, f"tuning-{rate:g}")


def _recipe(strategy: Strategy) -> Callable[..., Strategy] | None:
    name = recipe_of(strategy).name.replace("-", "_")
    return getattr(catalog, name) if name in catalog.__all__ else None


def _rate(strategy: Strategy) -> float | None:
    """The learning rate that a method was given or has by default; None if it has none, or its rule has one."""
    make, knobs = _recipe(strategy), recipe_of(strategy).knobs
    known: Any = {} if make is None else signature(make).parameters
    if "lr" not in known or knobs.get("rule") is not None:
        return None
    rate = knobs.get("lr", known["lr"].default)
    return float(rate) if isinstance(rate, int | float) else None


def _with_rate(strategy: Strategy, rate: float) -> Strategy:
    """The same method with another learning rate, under the same name."""
    make = _recipe(strategy)
    assert make is not None
    return spelled(make(**{**recipe_of(strategy).knobs, "lr": rate}), str(recipe_of(strategy)))


def _badness(run: RecordedRun) -> tuple[float, ...]:
    """A sort key, the best run first: whether it failed, then its accuracy, then its loss."""
    row = totals(run)
    loss = row["loss"]
    return float(row["failure"] is not None), -(row["accuracy"] or 0.0), float("inf") if loss is None else loss
