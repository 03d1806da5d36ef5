"""Synthetic: each stage runs both passes of a mini-batch at once, with a predicted error; it learns from the true one.

    K = 3 stages, M = 4 micro-batches
    s0 F0 B0 .  F1 B1 .  F2 B2 .  F3 B3 .  .
    s1 .  F0 B0 .  F1 B1 .  F2 B2 .  F3 B3 .
    s2 .  .  F0 B0 .  F1 B1 .  F2 B2 .  F3 B3

F(m), B(m) and U(m) of a stage follow one another, so no weights change in between. L(m) waits for B(m) of the next
stage, which sends the error that was predicted. With lag = 0 it follows U(m), and a stage waits for as
long as a forward pass takes. With lag = 1 it follows F(m + 1), and no stage waits once the pipeline is full.

    K = 3 stages, M = 4 micro-batches, lag = 1
    s0 F0 B0 F1 B1 F2 B2 F3 B3 .  .
    s1 .  F0 B0 F1 B1 F2 B2 F3 B3 .
    s2 .  .  F0 B0 F1 B1 F2 B2 F3 B3
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import count

from manyhands.splits.schedules.endless import EndlessRows, EndlessSchedule
from manyhands.splits.schedules.timeline import Action


def synthetic(stages: int, lag: int = 0) -> EndlessRows:
    """F, B and U of each mini-batch, and L of it or of the one before."""
    return [_row(stage, lag) for stage in range(stages)]


def _row(stage: int, lag: int) -> Iterator[Action]:
    """L(m - 1) comes before B(m), so that a drain, which ends at the first B that is not to be run, has it."""
    for m in count():
        yield Action("F", m, stage)
        if lag and m:
            yield Action("L", m - 1, stage)
        yield Action("B", m, stage)
        yield Action("U", m, stage)
        if not lag:
            yield Action("L", m, stage)


EXAMPLES: Mapping[str, EndlessSchedule] = {"synthetic": synthetic, "synthetic, lag 1": partial(synthetic, lag=1)}
