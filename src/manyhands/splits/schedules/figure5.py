"""Figure 5: every stage is busy without a pause from its first mini-batch on, however long the pipeline is.

    K = 4 stages, M = 6 micro-batches
    s0 F0 F1 F2 F3 F4 F5 .  B0 .  B1 .  B2 .  B3 .  B4 .  B5
    s1 .  F0 F1 F2 F3 F4 B0 F5 B1 .  B2 .  B3 .  B4 .  B5 .
    s2 .  .  F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 .  B4 .  B5 .  .
    s3 .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 .  .  .

Stage s begins with 2 (K - 1 - s) forward passes, twice as many as 1F1B, so that a forward and a backward pass may take
equally long and none waits for the other. There are 2 (K - 1 - s) updates between F(m) and B(m), and at most 2K - 1
mini-batches are in flight.

Reference: A. Petrowski, G. Dreyfus, C. Girault, Performance analysis of a pipelined backpropagation parallel algorithm,
1993.
"""

from __future__ import annotations

from collections.abc import Mapping

from manyhands.splits.schedules.alternating import alternating_row
from manyhands.splits.schedules.endless import EndlessRows, EndlessSchedule


def figure5(stages: int) -> EndlessRows:
    """2 (K - 1 - s) forward passes, then one of each for ever, with an update after each backward pass."""
    return [alternating_row(s, 2 * (stages - 1 - s)) for s in range(stages)]


EXAMPLES: Mapping[str, EndlessSchedule] = {"figure5": figure5}
