"""Endless schedules: rows of actions without an end, for pipelines that stream.

A row never waits for a number of mini-batches to be known: a run takes mini-batches in as long as there are some. If it
pauses or ends after M of them, what is left to do is the same row without the mini-batches from M on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from manyhands.splits.schedules.timeline import Action, Duration, Rows, length

EndlessRows = list[Iterator[Action]]
"""For every rank its actions in order, without an end."""
EndlessSchedule = Callable[[int], EndlessRows]
"""schedule(ranks)"""


def finite(rows: EndlessRows, micro_batches: int) -> Rows:
    """The actions of the first M micro-batches, which end where the first update without them is."""
    return [list(_until(row, micro_batches)) for row in rows]


def _until(row: Iterator[Action], micro_batches: int) -> Iterator[Action]:
    for action in row:
        if action.m < micro_batches:
            yield action
        elif action.op == "U":
            return


def steady_seconds(rows: Callable[[int], Rows], ranks: int, duration: Duration, pieces: int = 1) -> float:
    """How long a mini-batch of so many pieces takes once the pipeline is full; `rows` are those of the first pieces.

    It is full after 2K - 1 mini-batches, and rounds have as many.
    """
    part = 2 * (2 * ranks - 1)
    return (length(rows(2 * part * pieces), duration) - length(rows(part * pieces), duration)) / part
