"""Pipeline schedules are data, not code: NAME(K, M) gives one row of (op, micro-batch, stage) per rank."""

from manyhands.splits.schedules.gpipe import gpipe
from manyhands.splits.schedules.interleaved import interleaved
from manyhands.splits.schedules.one_f_one_b import one_f_one_b
from manyhands.splits.schedules.timeline import (
    Action,
    Rows,
    Schedule,
    bubble,
    in_flight,
    makespan,
    picture,
    staleness,
    timeline,
)
from manyhands.splits.schedules.zero_bubble import zero_bubble

__all__ = [
    "Action",
    "Rows",
    "Schedule",
    "bubble",
    "gpipe",
    "in_flight",
    "interleaved",
    "makespan",
    "one_f_one_b",
    "picture",
    "staleness",
    "timeline",
    "zero_bubble",
]
