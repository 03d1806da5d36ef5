"""The drawing of a method's pipeline schedule: found among the loops of its card, drawn from its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from manyhands.core.method_index import Method

RANKS = 4
SIZES = (4, 8)
"""Micro-batches: as many as ranks, and twice as many."""
WIDTH = 80
"""The columns of a drawing, as in a terminal."""


def drawings(method: Method) -> Iterator[tuple[str, str]]:
    """Titles and pictures of the schedules that the method plays; none if it has none."""
    names = [loop.name for loop in method.card.loops if loop.path.startswith("splits/schedules/")]
    if not names:
        return
    from manyhands.splits import schedules  # here, because it imports torch

    for name in names:
        schedule = getattr(schedules, name)
        if schedule.__annotations__.get("return") == "Rows":
            for count in SIZES:
                rows = schedule(RANKS, count)
                idle = _percent(schedules.bubble(rows, backward=2))
                title = f"{RANKS} workers, {count} micro-batches: {idle} idle if B takes two F"
                yield title, schedules.picture(rows, WIDTH)
        else:
            yield _stream(schedule)


def _stream(schedule: Callable[[int], Any]) -> tuple[str, str]:
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
