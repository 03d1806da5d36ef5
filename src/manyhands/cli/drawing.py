"""The drawing of a method's pipeline schedule, from the rows that it plays with its default knobs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from manyhands.core.method_index import Method

if TYPE_CHECKING:
    from manyhands.splits.schedules import EndlessSchedule

RANKS = 4
SIZES = (4, 8)
"""Micro-batches: as many as ranks, and twice as many."""
WIDTH = 80
"""The columns of a drawing, as in a terminal."""


def drawings(method: Method) -> Iterator[tuple[str, str]]:
    """Titles and pictures of the schedules that the method plays; none if it has none."""
    if not any(loop.path.startswith("splits/schedules/") for loop in method.card.loops):
        return
    from manyhands import catalog  # here, because these import torch
    from manyhands.splits import schedules
    from manyhands.splits.piped import rows_of
    from manyhands.strategies.streaming import Streaming

    strategy = getattr(catalog, method.function)()
    if isinstance(strategy, Streaming):
        yield _stream(strategy.schedule)
        return
    for count in SIZES:
        rows = rows_of(replace(strategy.team, micro_batches=count), RANKS)
        idle = _percent(schedules.bubble(rows, backward=2))
        title = f"{RANKS} workers, {count} micro-batches: {idle} idle if B takes two F"
        yield title, schedules.picture(rows, WIDTH)


def _stream(schedule: EndlessSchedule) -> tuple[str, str]:
    """The beginning of a schedule without an end, and how it is drained."""
    from manyhands.splits import schedules
    from manyhands.splits.schedules.timeline import lasting

    def rows(count: int) -> schedules.Rows:
        return schedules.finite(schedule(RANKS), count)

    slots = 1 + 2  # of a mini-batch on one rank
    idle = 1 - slots / schedules.steady_seconds(rows, RANKS, lasting(backward=2))
    count = 2 * RANKS - 1
    title = f"{RANKS} workers, {count} mini-batches, then a pause: {_percent(idle)} idle when full, if B takes two F"
    return title, schedules.picture(rows(count), WIDTH)


def _percent(idle: float) -> str:
    return f"{100 * max(idle, 0):.0f} %"
