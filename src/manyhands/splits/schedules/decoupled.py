"""Decoupled: the forward pass locks all stages in turn, only backward passes run side by side (DDG, Features Replay).

    K = 3 stages, M = 4 micro-batches
    s0 F0 .  .  .  F1 .  .  .  F2 B0 .  .  F3 B1 .  .  B2 B3
    s1 .  F0 .  .  .  F1 B0 .  .  F2 B1 .  .  F3 B2 .  B3 .
    s2 .  .  F0 B0 .  .  F1 B1 .  .  F2 B2 .  .  F3 B3 .  .

The rows are those of 1F1B, and stage 0 begins mini-batch m + 1 only after T(m): the last stage has updated with m. A
mini-batch therefore takes K tF + tB, instead of tF + tB.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from manyhands.splits.schedules.alternating import alternating
from manyhands.splits.schedules.endless import EndlessRows, EndlessSchedule
from manyhands.splits.schedules.timeline import Action


def decoupled(stages: int) -> EndlessRows:
    """1F1B, with T(m) of the last stage after U(m), and of stage 0 before F(m + 1)."""
    rows = alternating(stages)
    if stages > 1:
        rows[0], rows[-1] = _waits(rows[0]), _permits(rows[-1])
    return rows


def _waits(row: Iterator[Action]) -> Iterator[Action]:
    for action in row:
        if action.op == "F" and action.m:
            yield Action("T", action.m - 1, action.stage)
        yield action


def _permits(row: Iterator[Action]) -> Iterator[Action]:
    for action in row:
        yield action
        if action.op == "U":
            yield action._replace(op="T")


EXAMPLES: Mapping[str, EndlessSchedule] = {"decoupled": decoupled}
