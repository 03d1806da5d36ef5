"""Pipeline plan: what the ranks of a pipeline do, as data: for predictions (cost/pipelines.py) and drawings.

Of a method that divides a model into stages, by itself (streaming.py) or by its team (splits/piped.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import nn

from manyhands.core.param_groups import rule_of
from manyhands.core.rule import Rule
from manyhands.core.stage import Keep
from manyhands.core.strategy import Strategy
from manyhands.splits.layers import stages
from manyhands.splits.piped import Piped, kept_by, rows_of
from manyhands.splits.schedules import Rows, finite
from manyhands.splits.versions import StageWeights, Versions
from manyhands.strategies.allreduce import AllReduce
from manyhands.strategies.grid import Grid
from manyhands.strategies.streaming import Streaming, pieces


@dataclass(frozen=True)
class PipelinePlan:
    """What the ranks of one pipeline do.

    Args:
        ranks: how many there are.
        flushes: whether the pipeline is empty after each mini-batch.
        rows: the rows for so many micro-batches; of one that flushes those of a mini-batch.
        pieces: into how many micro-batches a mini-batch of so many samples is divided.
        part: what the rank with this index has of a model; of several stages a list.
        keep: what is kept of a forward pass with this part.
        splits: whether its backward passes are I and W.
        policy: which weights the passes see.
        every: micro-batches per update.
        rule: how a stage applies its gradient; None: the method keeps more than the state of a rule.
    """

    ranks: int
    flushes: bool
    rows: Callable[[int], Rows]
    pieces: Callable[[int], int]
    part: Callable[[nn.Module, int], nn.Module]
    keep: Callable[[nn.Module], Keep]
    splits: bool = False
    policy: Callable[[StageWeights], Versions] = Versions
    every: int = 1
    rule: Rule | None = None

    def stages(self, model: nn.Module) -> list[list[nn.Module]]:
        """The stages of each rank."""
        parts = [self.part(model, index) for index in range(self.ranks)]
        return [list(part) if isinstance(part, nn.ModuleList) else [part] for part in parts]


def pipeline_plan(strategy: Strategy, workers: int) -> PipelinePlan | None:
    """The plan of a method with so many workers; None if it is no pipeline."""
    if isinstance(strategy, Streaming):
        return _of_stream(strategy, workers)
    if isinstance(strategy, Grid) and isinstance(strategy.team, Piped):
        rule = rule_of(strategy) if isinstance(strategy.outer, AllReduce) else None
        return _of_team(strategy.team, strategy.team.size or workers, rule)
    return None


def _of_stream(strategy: Streaming, workers: int) -> PipelinePlan:
    return PipelinePlan(
        workers,
        flushes=False,
        rows=lambda count: finite(strategy.schedule(workers), count),
        pieces=partial(pieces, strategy, workers),
        part=lambda model, index: stages(model, workers)[index],
        keep=lambda _: strategy.keeps,
        policy=strategy.versions,
        every=strategy.micro_batches,
        rule=strategy.rule,
    )


def _of_team(team: Piped, size: int, rule: Rule | None) -> PipelinePlan:
    return PipelinePlan(
        size,
        flushes=True,
        rows=lambda _: rows_of(team, size),
        pieces=lambda _: team.micro_batches,
        part=lambda model, index: team.part(model, index, size),
        keep=partial(kept_by, team),
        splits=team.schedule == "zero-bubble",
        rule=rule,
    )
