"""Moments: the activities of each rank over time, from the steps, pauses and faults of the record.

    | wait |== compute ==|= encode =|- send -| wait | other |
    began  compute_began                                    time

The record has the length of each activity but only one moment inside a step, `compute_began`. The time before it is
filled with waiting, as far as the step has waited, then with sending and encoding; the rest follows in the order drawn.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from manyhands.core.record import StepLine
from manyhands.report.reading import RecordedRun

UNITS = {"min": 60.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9, "s": 1.0, "": 1.0}


class TimelineSegment(NamedTuple):
    """One activity of a rank, without interruption."""

    rank: int
    step: int
    activity: str
    start: float
    seconds: float


@dataclass(frozen=True)
class Incident:
    """Something went wrong with a rank: it was lost, or became slow."""

    rank: int
    at: float
    kind: str
    text: str


def segments(line: StepLine) -> Iterator[TimelineSegment]:
    """The activities of one step that took any time, in order."""
    rank, step, at, end = line["rank"], line["step"], line["began"], line["time"]
    gap = max(0.0, min(line["compute_began"], end) - at)
    parts, later = [], []
    for name in ("wait", "send", "encode"):
        before = min(gap, line[name])
        gap -= before
        parts.append((name, before))
        later.append((name, line[name] - before))
    for name, seconds in (*parts, ("other", gap), ("compute", line["compute"]), *reversed(later), ("other", end)):
        length = min(seconds, end - at)  # the last one takes the remaining time
        if length > 0:
            yield TimelineSegment(rank, step, name, at, length)
            at += length


def incidents(run: RecordedRun) -> list[Incident]:
    """The ranks that were lost or slowed down, in the order of time."""
    cluster = run.header.get("cluster") or {}
    faults = [fault for fault in cluster.get("faults") or [] if isinstance(fault, Mapping)]
    slowed = cluster.get("stragglers") or []
    planned = faults + ([slowed] if isinstance(slowed, Mapping) else list(slowed))
    found = [one for fault in planned if "factor" in fault for one in _slowed(fault)]
    moments = {fault["rank"]: seconds(fault["at"]) for fault in faults if "why" in fault}
    for rank, why in run.lost:
        found.append(Incident(rank, moments.get(rank, _last_seen(run, rank)), "lost", f"rank {rank} is lost: {why}"))
    return sorted(found, key=lambda one: (one.at, one.rank))


def _slowed(fault: Mapping[str, Any]) -> Iterator[Incident]:
    what = "computes" if "ranks" in fault else "is reached"
    for rank in fault.get("ranks", [fault.get("rank")]):
        text = f"rank {rank} {what} {fault['factor']:g} times slower"
        yield Incident(rank, seconds(fault.get("at", 0.0)), "slow", text)


def _last_seen(run: RecordedRun, rank: int) -> float:
    return max((float(line["time"]) for line in run.steps if line["rank"] == rank), default=0.0)


def seconds(at: str | float) -> float:
    """Seconds of a moment as cluster files write it, such as 50ms."""
    found = re.fullmatch(r"\s*([0-9.e+-]+?)\s*(min|ms|us|µs|ns|s|)\s*", str(at))
    return float(found[1]) * UNITS[found[2]] if found else 0.0
