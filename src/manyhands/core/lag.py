"""Lag: how stale the gradients of a worker were when they were applied, and which were dropped.

    read w at version 5 -- compute g -- updates 6, 7 of others -- w <- w + rule(g)        the lag of g is 2

The lag of a gradient is the number of updates that were applied to the same weights after these had been read for it
and before it was applied itself, and that the weights it was computed at do not contain. `Traits.lag_counts` of a
strategy says what its updates are. The lag of a gradient that is dropped is that of the moment in which it is dropped.
Where a vector is divided into shards, its lag is that at the shard where it is largest.

A worker may know the outcome of a gradient only in a later step, with its next read: a line of the record contains what
has become known in its step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple


class Outcomes(NamedTuple):
    """How many gradients of a worker were applied and how many were dropped, with their lags."""

    applied: int = 0
    lag_sum: int = 0
    lag_max: int = 0
    dropped: int = 0
    dropped_lag_sum: int = 0

    def plus(self, other: Outcomes) -> Outcomes:
        """Of these gradients and of others."""
        return Outcomes(
            self.applied + other.applied,
            self.lag_sum + other.lag_sum,
            max(self.lag_max, other.lag_max),
            self.dropped + other.dropped,
            self.dropped_lag_sum + other.dropped_lag_sum,
        )


NO_OUTCOMES = Outcomes()


def applied_at(lag: int) -> Outcomes:
    """One gradient was applied, with this lag."""
    return Outcomes(1, lag, lag)


def largest(parts: Iterable[Outcomes]) -> Outcomes:
    """The outcomes of the same gradients at several shards, as one: for each number the largest."""
    return Outcomes(*map(max, zip(*parts, strict=True)))


class StepLag(NamedTuple):
    """What a worker came to know in one step about its gradients and reads."""

    outcomes: Outcomes = NO_OUTCOMES
    apart: int | None = None
    """How many versions apart the shards were that it read; None if it has not read several."""
    ahead: int | None = None
    """How many clocks it was ahead of the slowest worker when it read; None if no clock is bounded."""

    @property
    def lag(self) -> int | None:
        """The largest lag of the applied gradients; None if there are none, or if it is not defined."""
        return self.outcomes.lag_max if self.outcomes.applied else None

    def fields(self) -> dict[str, int | None]:
        """The same as fields of a line of the record; those that say nothing are left out, except the lag itself."""
        done = self.outcomes
        found: dict[str, int | None] = {"lag": self.lag}
        if done.applied > 1:
            found.update(applied=done.applied, lag_sum=done.lag_sum)
        if done.dropped:
            found.update(dropped=done.dropped, dropped_lag_sum=done.dropped_lag_sum)
        if self.apart is not None:
            found["apart"] = self.apart
        if self.ahead is not None:
            found["ahead"] = self.ahead
        return found


@lru_cache(maxsize=256)
def step_lag(lag: int) -> StepLag:
    """One gradient was applied in this step; made once for each lag, because steps can be short."""
    return StepLag(applied_at(lag))


UNKNOWN_LAG = StepLag()
NO_LAG = step_lag(0)
"""The lag of each step in lock step."""


class LagSummary(NamedTuple):
    """The lags of a run. What was not measured, or is not defined for the method, is None."""

    mean: float | None = None
    """Over the gradients that were applied."""
    max: int | None = None
    dropped: int = 0
    """How many gradients were dropped."""
    dropped_mean: float | None = None
    """The mean lag of the dropped gradients."""
    apart_mean: float | None = None
    """How many versions apart the shards of one read were; None with a single shard, and without shards."""
    apart_max: int | None = None
    ahead_max: int | None = None
    """How many clocks a worker was ahead of the slowest when it read; None if clocks are not bounded."""


def lag_fields(lag: LagSummary) -> dict[str, float | int | None]:
    """The summary as fields of a row or a result."""
    return {
        "mean_lag": lag.mean,
        "max_lag": lag.max,
        "dropped": lag.dropped,
        "dropped_mean_lag": lag.dropped_mean,
        "mean_apart": lag.apart_mean,
        "max_apart": lag.apart_max,
        "max_ahead": lag.ahead_max,
    }


def lag_summary(steps: Sequence[Mapping[str, Any]]) -> LagSummary:
    """The lags in the step lines of a record."""
    known = [line for line in steps if line["lag"] is not None]
    applied = sum(line.get("applied", 1) for line in known)
    dropped = sum(line.get("dropped", 0) for line in steps)
    dropped_lags = sum(line.get("dropped_lag_sum", 0) for line in steps)
    apart = [line["apart"] for line in steps if line.get("apart") is not None]
    return LagSummary(
        mean=sum(line.get("lag_sum", line["lag"]) for line in known) / applied if applied else None,
        max=max((line["lag"] for line in known), default=None),
        dropped=dropped,
        dropped_mean=dropped_lags / dropped if dropped else None,
        apart_mean=sum(apart) / len(apart) if apart else None,
        apart_max=max(apart, default=None),
        ahead_max=max((line["ahead"] for line in steps if line.get("ahead") is not None), default=None),
    )
