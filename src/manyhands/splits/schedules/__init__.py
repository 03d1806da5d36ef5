"""Pipeline schedules are data, not code: one row of (op, micro-batch, stage) per rank.

Those that flush are NAME(K, M); those that stream are NAME(K), without an end.
"""

from manyhands.splits.schedules.alternating import alternating
from manyhands.splits.schedules.decoupled import decoupled
from manyhands.splits.schedules.endless import EndlessRows, EndlessSchedule, finite, steady_seconds
from manyhands.splits.schedules.figure5 import figure5
from manyhands.splits.schedules.gpipe import gpipe
from manyhands.splits.schedules.interleaved import interleaved
from manyhands.splits.schedules.one_f_one_b import one_f_one_b
from manyhands.splits.schedules.round_robin import placed, round_robin, warm_up
from manyhands.splits.schedules.rounds import rounds
from manyhands.splits.schedules.synthetic import synthetic
from manyhands.splits.schedules.timeline import (
    Action,
    Rows,
    Schedule,
    bubble,
    busy,
    in_flight,
    length,
    makespan,
    picture,
    staleness,
    timeline,
)
from manyhands.splits.schedules.zero_bubble import zero_bubble

__all__ = [
    "Action",
    "EndlessRows",
    "EndlessSchedule",
    "Rows",
    "Schedule",
    "alternating",
    "bubble",
    "busy",
    "decoupled",
    "figure5",
    "finite",
    "gpipe",
    "in_flight",
    "interleaved",
    "length",
    "makespan",
    "one_f_one_b",
    "picture",
    "placed",
    "round_robin",
    "rounds",
    "staleness",
    "steady_seconds",
    "synthetic",
    "timeline",
    "warm_up",
    "zero_bubble",
]
