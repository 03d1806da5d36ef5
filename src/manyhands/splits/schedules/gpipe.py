"""GPipe: all forward passes of a mini-batch, then all backward passes.

    K = 4 stages, M = 4 micro-batches
    s0 F0 F1 F2 F3 .  .  .  .  .  .  B0 B1 B2 B3
    s1 .  F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3 .
    s2 .  .  F0 F1 F2 F3 .  .  B0 B1 B2 B3 .  .
    s3 .  .  .  F0 F1 F2 F3 B0 B1 B2 B3 .  .  .

The bubble is (K - 1) / (M + K - 1) of the time. Every stage stores the activations of M micro-batches. The paper draws
the backward passes from the last micro-batch to the first; this order has the same length and the same sum.
"""

from __future__ import annotations

from collections.abc import Mapping

from manyhands.splits.schedules.timeline import Action, Rows, Schedule


def gpipe(stages: int, micro_batches: int) -> Rows:
    """All forward passes, then all backward passes, on every stage."""
    return [[Action(op, m, s) for op in "FB" for m in range(micro_batches)] for s in range(stages)]


EXAMPLES: Mapping[str, Schedule] = {"gpipe": gpipe}
