"""Pipeline plan: what the ranks of a pipeline do, as data: for predictions (cost/pipelines.py) and drawings.

Of a method that divides a model into stages, by itself (streaming.py) or by its team (splits/piped.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from manyhands.core.param_groups import rule_of
from manyhands.core.rule import Rule
from manyhands.core.stage import Keep
from manyhands.core.strategy import Strategy
from manyhands.splits.cuts import parted
from manyhands.splits.piped import Piped, chunks_of, keep_of, rows_of
from manyhands.splits.schedules import Rows, finite, picture
from manyhands.splits.versions import StageWeights, Versions
from manyhands.strategies.allreduce import AllReduce
from manyhands.strategies.grid import Grid
from manyhands.strategies.planned import Planned
from manyhands.strategies.replicated import Replicated
from manyhands.strategies.streaming import Streaming, pieces
from manyhands.strategies.synthetic import Synthetic

WIDTH = 120
"""The columns of a drawing in a report."""
MOST_DRAWN = 400
"""Micro-batches on all ranks: a drawing of more would not be read."""


@dataclass(frozen=True)
class PipelinePlan:
    """What the ranks of one pipeline do.

    Args:
        ranks: how many there are.
        flushes: whether the pipeline is empty after each mini-batch.
        rows: the rows for so many micro-batches; of one that flushes those of a mini-batch.
        pieces: into how many micro-batches a mini-batch of so many samples is divided.
        stages: what the model is divided into.
        placed: the numbers of the stages of each rank.
        keep: what is kept of a forward pass.
        splits: whether its backward passes are I and W.
        policy: which weights the passes see.
        every: micro-batches per update.
        rule: how a stage applies its gradient; None: the method keeps more than the state of a rule.
        chosen: where stages begin and how many ranks each has, if the method has planned that.
    """

    ranks: int
    flushes: bool
    rows: Callable[[int], Rows]
    pieces: Callable[[int], int]
    stages: Callable[[nn.Module], Sequence[nn.Module]]
    placed: Sequence[Sequence[int]]
    keep: Keep
    splits: bool = False
    policy: Callable[[StageWeights], Versions] = Versions
    every: int = 1
    rule: Rule | None = None
    chosen: Mapping[str, Any] = field(default_factory=dict)


def pipeline_plan(strategy: Strategy, workers: int) -> PipelinePlan | None:
    """The plan of a method with so many workers; None if it is no pipeline, or has no stages yet (planned.py)."""
    if isinstance(strategy, Planned) and not strategy.replicas_of:
        return None
    if isinstance(strategy, Streaming):
        return _of_stream(strategy, workers)
    if isinstance(strategy, Grid) and isinstance(strategy.team, Piped):
        rule = rule_of(strategy) if isinstance(strategy.outer, AllReduce) else None
        return _of_team(strategy.team, strategy.team.size or workers, rule)
    return None


def _of_stream(strategy: Streaming, workers: int) -> PipelinePlan:
    replicas = strategy.replicas_of if isinstance(strategy, Replicated) else (1,) * workers
    placed = [(stage,) for stage, count in enumerate(replicas) for _ in range(count)]
    return PipelinePlan(
        workers,
        flushes=False,
        rows=lambda count: finite(strategy.schedule(workers), count),
        pieces=partial(pieces, strategy, workers),
        stages=lambda model: strategy.cuts.stages(model, len(replicas)),
        placed=placed,
        keep=strategy.keeps,
        policy=strategy.versions,
        every=strategy.micro_batches,
        rule=None if isinstance(strategy, Synthetic) else strategy.rule,
        chosen=strategy.plan if isinstance(strategy, Planned) else {},
    )


def _of_team(team: Piped, size: int, rule: Rule | None) -> PipelinePlan:
    count = size * chunks_of(team, size)

    def stages(model: nn.Module) -> list[nn.Module]:
        by_rank = [parted(team.part(model, rank, size)) for rank in range(size)]
        return [by_rank[s % size][s // size] for s in range(count)]

    return PipelinePlan(
        size,
        flushes=True,
        rows=lambda _: rows_of(team, size),
        pieces=lambda _: team.micro_batches,
        stages=stages,
        placed=[range(rank, count, size) for rank in range(size)],
        keep=keep_of(team),
        splits=team.schedule == "zero-bubble",
        rule=rule,
    )


def drawn_schedule(strategy: Strategy, workers: int, samples: int) -> dict[str, str]:
    """The picture of the rows for the header of a record, if it is not too large: of a stream 2K - 1 mini-batches."""
    plan = pipeline_plan(strategy, workers)
    if plan is None or plan.ranks == 1:
        return {}
    count = plan.pieces(samples)
    passes = plan.ranks * count * (1 if plan.flushes else 2 * plan.ranks - 1)
    if passes > MOST_DRAWN:
        return {}
    return {"schedule": picture(plan.rows(passes // plan.ranks), WIDTH)}
