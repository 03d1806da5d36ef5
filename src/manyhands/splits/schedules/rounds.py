"""Rounds: Figure 5 in rounds of 2K - 1 mini-batches; the pipeline drains at the end of each, for an action A.

    K = 2 stages, M = 6 micro-batches
    s0 F0 F1 F2 B0 .  B1 .  B2 F3 F4 F5 B3 .  B4 .  B5
    s1 .  F0 B0 F1 B1 F2 B2 .  .  F3 B3 F4 B4 F5 B5 .

A(m) follows the update U(m) of the last mini-batch of a round. It takes no slot and needs no message: when a stage has
finished its row of a round, none of its mini-batches is in flight.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import count

from manyhands.splits.schedules.endless import EndlessRows, EndlessSchedule, finite
from manyhands.splits.schedules.figure5 import figure5
from manyhands.splits.schedules.timeline import Action


def rounds(stages: int, times: int = 1) -> EndlessRows:
    """Figure 5 for `times` (2K - 1) mini-batches, then A, then again."""
    size = times * (2 * stages - 1)
    return [_again(row, size) for row in finite(figure5(stages), size)]


def _again(row: list[Action], size: int) -> Iterator[Action]:
    for start in count(0, size):
        for action in row:
            yield action._replace(m=start + action.m)
        yield Action("A", start + size - 1, row[0].stage)


EXAMPLES: Mapping[str, EndlessSchedule] = {"rounds": rounds, "rounds of two": partial(rounds, times=2)}
