"""Zero bubble (H1): the backward pass is split, and the gradients of weights are computed while others would wait.

    K = 4 stages, M = 6 micro-batches
    s0 F0 F1 F2 F3 .  .  .  I0 W0 F4 I1 W1 F5 I2 W2 I3 W3 I4 W4 I5 W5
    s1 .  F0 F1 F2 .  .  I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 I4 W3 I5 W4 W5
    s2 .  .  F0 F1 .  I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 I5 W3 W4 W5
    s3 .  .  .  F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 W3 W4 W5

It is 1F1B with I (the error for the previous stage) in the place of B, and W(m) (the gradient of the weights) after
I(m + s): the later the stage, the longer its W are put off. A rank idles (K - 1)(tF + tI - tW) instead of
(K - 1)(tF + tI + tW). Every stage stores the activations of K micro-batches, as the first one does in 1F1B.

Reference: P. Qi et al., Zero bubble pipeline parallelism, 2024, https://arxiv.org/abs/2401.10241.
"""

from __future__ import annotations

from collections.abc import Mapping

from manyhands.splits.schedules.timeline import Action, Rows, Schedule


def zero_bubble(stages: int, micro_batches: int) -> Rows:
    """Warm-up, alternating passes with delayed weight gradients, then those that are left, on every stage."""
    rows = []
    for s in range(stages):
        warm = min(micro_batches, stages - 1 - s)
        row = [Action("F", m, s) for m in range(warm)]
        for m in range(micro_batches):
            if warm + m < micro_batches:
                row.append(Action("F", warm + m, s))
            row.append(Action("I", m, s))
            if m >= s:
                row.append(Action("W", m - s, s))
        row += [Action("W", m, s) for m in range(max(0, micro_batches - s), micro_batches)]
        rows.append(row)
    return rows


EXAMPLES: Mapping[str, Schedule] = {"zero_bubble": zero_bubble}
