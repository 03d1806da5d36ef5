"""Ranking: methods side by side, ordered by their time to target.

    time to target  =  samples to target  /  samples per second
                       statistical           hardware efficiency

Every method has one row with the medians over its seeds and their range. First are the methods that reached the target
with the most seeds, ordered by time; then those that did not, ordered by quality; then those that failed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from manyhands.report.measures import Target, totals
from manyhands.report.reading import RecordedRun

Row = dict[str, Any]

MEDIANS = (
    *("seconds_to_target", "samples_to_target", "bytes_to_target", "samples_per_second", "accuracy", "loss"),
    *("seconds", "samples", "bytes", "mean_lag", "max_lag", "dropped", "dropped_mean_lag", "mean_apart", "max_apart"),
    *("max_ahead", "waiting", "memory"),
)
"""The fields of a row that are medians over seeds."""


def ranking(runs: Sequence[RecordedRun], target: Target | None = None) -> list[Row]:
    """A row for each method, the best first."""
    by_method: dict[str, list[Row]] = {}
    for run in runs:
        by_method.setdefault(run.method, []).append(totals(run, target))
    best = sorted(by_method.items(), key=lambda pair: standing(pair[1], target))
    return [{"rank": index, **_row(method, found)} for index, (method, found) in enumerate(best, 1)]


def standing(found: Sequence[Row], target: Target | None = None) -> tuple[float, ...]:
    """The sort key of a method, from the totals of its runs: less is better."""
    failed = sum(one["failure"] is not None for one in found)
    done = [one for one in found if one["failure"] is None] or found
    accuracy, loss, seconds = (_median(done, name) for name in ("accuracy", "loss", "seconds"))
    quality = -(accuracy if accuracy is not None else 0.0), loss if loss is not None else math.inf
    if target is None:
        return failed, *quality, seconds or 0.0
    missed = sum(one["seconds_to_target"] is None for one in found) / max(1, len(found))
    return missed, failed, _median(done, "seconds_to_target") or 0.0, *quality


def _row(method: str, found: Sequence[Row]) -> Row:
    done = [one for one in found if one["failure"] is None]
    reached = [one for one in found if one["seconds_to_target"] is not None]
    why = next((one["failure"] for one in found if one["failure"] is not None), None)
    return {
        "method": method,
        "seeds": len(found),
        "failed": len(found) - len(done),
        "reached": len(reached),
        **{name: _median(done or found, name) for name in MEDIANS},
        "spread": _spread(reached, "seconds_to_target"),
        "failure": why,
    }


def _median(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [row[name] for row in rows if row[name] is not None]
    return median(values) if values else None


def _spread(rows: Sequence[Mapping[str, Any]], name: str) -> tuple[float, float] | None:
    """The range; None unless there are several values."""
    values = [row[name] for row in rows]
    return (min(values), max(values)) if len(values) > 1 else None
