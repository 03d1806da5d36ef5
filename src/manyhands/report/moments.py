"""Moments: what each rank did when, as steps, pauses and faults of the record tell it.

    | wait |== compute ==|= encode =|- send -| wait | other |
    began  compute_began                                    time

The record has the length of each part but only one moment inside a step. What lies before it is waiting first, as far
as the step has waited, then sending and encoding; the rest follows in the order drawn.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from manyhands.core.lines import Line
from manyhands.report.reading import Run

UNITS = {"min": 60.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9, "s": 1.0, "": 1.0}


class Segment(NamedTuple):
    """A rank did one thing for a while."""

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


def segments(line: Line) -> Iterator[Segment]:
    """The parts of one step that took any time, one after the other."""
    rank, step, at, end = line["rank"], line["step"], line["began"], line["time"]
    gap = max(0.0, min(line["compute_began"], end) - at)
    parts, later = [], []
    for name in ("wait", "send", "encode"):
        before = min(gap, line[name])
        gap -= before
        parts.append((name, before))
        later.append((name, line[name] - before))
    for name, seconds in (*parts, ("other", gap), ("compute", line["compute"]), *reversed(later), ("other", end)):
        length = min(seconds, end - at)  # of the last one as much as is left
        if length > 0:
            yield Segment(rank, step, name, at, length)
            at += length


def incidents(run: Run) -> list[Incident]:
    """Who was lost and who was slowed down, in the order of time."""
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


def _last_seen(run: Run, rank: int) -> float:
    return max((float(line["time"]) for line in run.steps if line["rank"] == rank), default=0.0)


def seconds(at: str | float) -> float:
    """Seconds of a moment as cluster files write it, such as 50ms."""
    found = re.fullmatch(r"\s*([0-9.e+-]+?)\s*(min|ms|us|µs|ns|s|)\s*", str(at))
    return float(found[1]) * UNITS[found[2]] if found else 0.0
