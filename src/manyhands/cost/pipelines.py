"""What each rank of a pipeline keeps, and how long it is idle, without training: from its rows and two small samples.

    weights       parameters and buffers of its stages
    gradient      the flat gradient
    optimizer     found by one update of a few weights by the method's rule
    versions      found by playing the row of the rank on a few weights
    activations   the row, with what a stage keeps of a micro-batch; that is linear in its samples, and measured on two
                  and on four of them
    idle          the rows, if passes take as long as their operations and messages no time

Nothing is rounded up for messages in transit. What the method of a team keeps besides a rule's state is not known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.core.errors import Refused, refuse_unless
from manyhands.core.stage import Keep
from manyhands.core.task import Task
from manyhands.core.work import Work, share_of
from manyhands.cost.kept import kept_by_stages, most_kept
from manyhands.cost.versions import VersionBytes, version_bytes
from manyhands.splits.schedules import Rows, busy, in_flight, length, steady_seconds
from manyhands.splits.schedules.timeline import Action, Duration
from manyhands.strategies.pipeline_plan import PipelinePlan


@dataclass(frozen=True)
class RankCost:
    """What one rank of a pipeline has.

    Args:
        rank: its number in the pipeline.
        stages: the numbers of its stages.
        parameters: how many it has.
        work: its share of the operations of both passes, without what is computed again.
        weights: bytes, as all that follow.
        gradient: with a number for each parameter, whether it was touched.
        optimizer: of the rule, for all versions that have a state of their own; None: not known.
        versions: how many versions of the weights it keeps, the live one too.
        version_bytes: of the other versions.
        in_flight: the most micro-batches whose activations it keeps.
        activations: the most that it keeps for backward passes at one time; None: not known.
        idle: the share of the time in which it waits.
    """

    rank: int
    stages: tuple[int, ...]
    parameters: int
    work: float
    weights: int
    gradient: int
    optimizer: int | None
    versions: int
    version_bytes: int
    in_flight: int
    activations: int | None
    idle: float

    @property
    def total(self) -> int | None:
        """All bytes; None if a part is not known."""
        parts = (self.weights, self.gradient, self.optimizer, self.version_bytes, self.activations)
        known = [part for part in parts if part is not None]
        return sum(known) if len(known) == len(parts) else None


@dataclass(frozen=True)
class PipelineCost:
    """All ranks of a pipeline.

    Args:
        ranks: in their order.
        batch_size: samples of a mini-batch.
        micro_batches: into how many it is divided.
        idle: the share of all ranks' time in which they wait.
        speedup: how many times faster the pipeline is than one worker without messages.
        chosen: as in `PipelinePlan`.
    """

    ranks: tuple[RankCost, ...]
    batch_size: int
    micro_batches: int
    idle: float
    speedup: float
    chosen: Mapping[str, Any]


def pipeline_cost(task: Task, plan: PipelinePlan, batch_size: int | None = None) -> PipelineCost:
    """What the ranks of a pipeline have, for mini-batches of the task's size or another one."""
    samples = batch_size or task.batch_size
    count = plan.pieces(samples)
    refuse_unless(samples >= count, "batch_size", samples, f">= {count}, the number of micro-batches")
    if task.gradient is not None:
        raise Refused("a pipeline needs a task with a loss function, but this one computes its gradient itself")
    model = task.build(0)
    stages = plan.stages(model)
    sizes = [len(piece) for piece in torch.arange(samples).tensor_split(count)]
    work = [share_of(model, stage) for stage in stages]
    rows, seconds, spent = _mini_batch(plan, count, _duration(work, sizes, plan.keep))
    kept, versions = kept_by_stages(task, stages, splits=plan.splits), version_bytes(plan, rows)
    ranks = [
        RankCost(
            rank,
            stages=tuple(numbers),
            parameters=sum(p.numel() for p in _parameters(stages[s] for s in numbers)),
            work=sum(work[s].total for s in numbers),
            **_bytes([stages[s] for s in numbers], versions[rank]),
            in_flight=in_flight(rows[rank]),
            activations=most_kept(rows[rank], kept, sizes, plan.keep),
            idle=_idle(spent[rank], seconds),
        )
        for rank, numbers in enumerate(plan.placed)
    ]
    speedup = samples * sum(one.total for one in work) / seconds
    idle = _idle(sum(spent), plan.ranks * seconds)
    return PipelineCost(tuple(ranks), samples, count, idle, speedup, plan.chosen)


def _idle(spent: float, seconds: float) -> float:
    return max(0.0, round(1 - spent / seconds, 9))  # not the rounding of a sum of seconds


def _duration(work: Sequence[Work], sizes: Sequence[int], keep: Keep) -> Duration:
    """Passes take as long as their operations; a replay computes the forward pass again."""

    def of(action: Action) -> float:
        one, again = work[action.stage], work[action.stage].forward * (keep == "inputs")
        parts = {"F": one.forward, "B": one.backward + again, "I": one.to_input + again, "W": one.to_weights}
        return parts.get(action.op, 0.0) * sizes[action.m % len(sizes)]

    return of


def _mini_batch(plan: PipelinePlan, count: int, duration: Duration) -> tuple[Rows, float, list[float]]:
    """Rows, how long a mini-batch takes, and how long each rank computes for it; of a stream, once it is full."""
    if plan.flushes:
        rows = plan.rows(count)
        return rows, length(rows, duration), [busy([row], duration) for row in rows]
    whole = 4 * plan.ranks
    rows = plan.rows(whole * count)
    seconds = steady_seconds(plan.rows, plan.ranks, duration, count)
    return rows, seconds, [busy([row], duration) / whole for row in rows]


def _bytes(stages: Iterable[nn.Module], versions: VersionBytes) -> dict[str, Any]:
    """Those of a rank with these stages, but for the activations."""
    parameters = _parameters(stages)
    trained = [p for p in parameters if p.requires_grad]
    size = sum(p.nbytes for p in trained)
    return {
        "weights": sum(x.nbytes for x in [*parameters, *(x for stage in stages for x in stage.buffers())]),
        "gradient": size + sum(p.element_size() for p in trained),
        "optimizer": None if versions.optimizer is None else round(versions.optimizer * size),
        "versions": versions.kept,
        "version_bytes": round(versions.others * size),
    }


def _parameters(stages: Iterable[nn.Module]) -> list[Tensor]:
    """Each once."""
    return list({id(p): p for stage in stages for p in stage.parameters()}.values())
