"""Alternating: 1F1B without a flush. After its warm-up a stage alternates between forward and backward passes for ever.

    K = 4 stages, M = 4 micro-batches
    s0 F0 F1 F2 F3 .  .  .  B0 .  B1 .  B2 .  B3
    s1 .  F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3 .
    s2 .  .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .  .
    s3 .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .  .

Stage s begins with K - 1 - s forward passes. An update U(m) follows B(m), or every n-th one. With an update after every
B there are K - 1 - s updates between F(m) and B(m) once the pipeline is full.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import count

from manyhands.splits.schedules.endless import EndlessRows, EndlessSchedule
from manyhands.splits.schedules.timeline import Action


def alternating(stages: int, every: int = 1) -> EndlessRows:
    """K - 1 - s forward passes, then one of each for ever, with an update after every so many backward passes."""
    return [alternating_row(s, stages - 1 - s, every) for s in range(stages)]


def alternating_row(stage: int, warm: int, every: int = 1) -> Iterator[Action]:
    """One stage's row: `warm` forward passes, then a forward and a backward pass in turn."""
    for m in range(warm):
        yield Action("F", m, stage)
    for m in count():
        yield Action("F", warm + m, stage)
        yield Action("B", m, stage)
        if (m + 1) % every == 0:
            yield Action("U", m, stage)


EXAMPLES: Mapping[str, EndlessSchedule] = {
    "alternating": alternating,
    "alternating, an update of two": partial(alternating, every=2),
}
