"""1F1B: after a warm-up every stage alternates between one forward and one backward pass.

    K = 4 stages, M = 4 micro-batches
    s0 F0 F1 F2 F3 .  .  .  B0 .  B1 .  B2 .  B3
    s1 .  F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3 .
    s2 .  .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .  .
    s3 .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .  .

Stage s warms up with min(M, K - 1 - s) forward passes and stores the activations of at most K - s micro-batches, for
any M. With an update after every B (PipeDream), there are K - 1 - s updates between F(m) and B(m).
"""

from __future__ import annotations

from collections.abc import Mapping

from manyhands.splits.schedules.timeline import Action, Rows, Schedule


def one_f_one_b(stages: int, micro_batches: int) -> Rows:
    """Warm-up, alternating passes, then the remaining backward passes, on every stage."""
    rows = []
    for s in range(stages):
        warm = min(micro_batches, stages - 1 - s)
        row = [Action("F", m, s) for m in range(warm)]
        for m in range(micro_batches):
            if warm + m < micro_batches:
                row.append(Action("F", warm + m, s))
            row.append(Action("B", m, s))
        rows.append(row)
    return rows


EXAMPLES: Mapping[str, Schedule] = {"one_f_one_b": one_f_one_b}
