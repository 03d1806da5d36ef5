"""The drawing of a method's pipeline schedule: found among the loops of its card, drawn from its rows."""

from __future__ import annotations

from collections.abc import Iterator

from manyhands.core.method_index import Method

RANKS = 4
SIZES = (4, 8)
"""Micro-batches: as many as ranks, and twice as many."""


def drawings(method: Method) -> Iterator[tuple[str, str]]:
    """Titles and pictures of the schedules that the method plays; none if it has none."""
    names = [loop.name for loop in method.card.loops if loop.path.startswith("splits/schedules/")]
    if not names:
        return
    from manyhands.splits import schedules  # here, because it imports torch

    for name in names:
        schedule = getattr(schedules, name)
        if schedule.__annotations__.get("return") == "Rows":  # one that never ends has no picture
            for count in SIZES:
                rows = schedule(RANKS, count)
                idle = f"{100 * schedules.bubble(rows, backward=2):.0f} % idle"
                title = f"{RANKS} workers, {count} micro-batches: {idle} if a backward pass takes two forward passes"
                yield title, schedules.picture(rows)
