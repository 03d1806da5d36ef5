"""Interleaved 1F1B: every rank has several stages, which lie apart, so that the pipeline fills and drains sooner.

    K = 2 stages, M = 4 micro-batches
    s0 F0  F1  F0' F1' F2  B0' F3  B1' F2' B0  F3' B1  .   B2' .   B3' B2  B3
    s1 .   F0  F1  F0' B0' F1' B1' F2  B0  F3  B1  F2' B2' F3' B3' B2  B3  .

With P ranks, each with v stages, rank r has the stages r, r + P, ..., r + (v - 1) P. Micro-batches pass through in
groups of P, so M must be divisible by P. The k-th forward pass of a rank is micro-batch k // (P v) P + k % P on its
stage (k % (P v)) // P; backward passes take the stages in reverse order; 2 (P - 1 - r) + (v - 1) P forward passes come
first.

The bubble is (P - 1) / (v M + P - 1) of the time, for v times as many messages.

Reference: D. Narayanan et al., Efficient large-scale language model training on GPU clusters using Megatron-LM, 2021,
https://arxiv.org/abs/2104.04473.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from manyhands.core.errors import refuse_unless
from manyhands.splits.schedules.timeline import Action, Rows, Schedule


def interleaved(ranks: int, micro_batches: int, chunks: int = 2) -> Rows:
    """Warm-up, alternating passes, then the remaining backward passes, on every rank."""
    fits = micro_batches % ranks == 0
    refuse_unless(fits, "micro_batches", micro_batches, f"divisible by {ranks}, the ranks of the pipeline")
    return [_row(rank, ranks, micro_batches, chunks) for rank in range(ranks)]


def _row(r: int, P: int, M: int, v: int) -> list[Action]:
    def action(op: str, k: int) -> Action:
        m, chunk = k // (P * v) * P + k % P, k % (P * v) // P
        return Action(op, m, (chunk if op == "F" else v - 1 - chunk) * P + r)

    passes, warm = M * v, min(M * v, 2 * (P - 1 - r) + (v - 1) * P)
    row = [action("F", k) for k in range(warm)]
    for k in range(passes):
        if warm + k < passes:
            row.append(action("F", warm + k))
        row.append(action("B", k))
    return row


EXAMPLES: Mapping[str, Schedule] = {"interleaved": interleaved, "interleaved by 3": partial(interleaved, chunks=3)}
