"""Pipeline schedules are data, not code: NAME(K, M) gives one row of (op, micro-batch) per stage."""

from manyhands.splits.schedules.gpipe import gpipe
from manyhands.splits.schedules.one_f_one_b import one_f_one_b
from manyhands.splits.schedules.timeline import Schedule, bubble, in_flight, makespan, picture, staleness, timeline

__all__ = ["Schedule", "bubble", "gpipe", "in_flight", "makespan", "one_f_one_b", "picture", "staleness", "timeline"]
