"""`manyhands cost TASK --method METHOD --workers N`: what each rank of a pipeline keeps, and how long it waits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from manyhands.cli.output import console, print_table
from manyhands.core.errors import Refused
from manyhands.report.theme import bytes_text, plural, share_text

if TYPE_CHECKING:
    from manyhands.core.task import Task
    from manyhands.cost.pipelines import PipelineCost, RankCost

COLUMNS = (
    *("rank", "stages", "parameters", "work", "idle"),
    *("weights", "gradient", "optimizer", "versions", "activations", "together"),
)
UNKNOWN = "-"


def cost_of(task: Task, method: str, workers: int, batch_size: int | None) -> PipelineCost:
    """The cost of a method's pipeline; a method that is none is refused."""
    from manyhands.cost.pipelines import pipeline_cost  # here, because they import torch
    from manyhands.run.methods import strategy_of
    from manyhands.strategies.pipeline_plan import pipeline_plan
    from manyhands.strategies.planned import Planned

    strategy, model, samples = strategy_of(method), task.build(0), batch_size or task.batch_size
    if isinstance(strategy, Planned):
        strategy = strategy.planned(model, workers, samples)
    plan = pipeline_plan(strategy, workers)
    if plan is None:
        raise Refused(
            f"{method} divides no model among its workers, but costs by rank are those of a pipeline: "
            f"gpipe, pipedream or others, or '{method}:team=piped(2)'"
        )
    strategy.check(workers, 0, samples, model)
    return pipeline_cost(task, plan, batch_size)


def facts(method: str, cost: PipelineCost) -> dict[str, Any]:
    """The cost as one object; sizes in bytes."""
    ranks = [{**asdict(rank), "total": rank.total} for rank in cost.ranks]
    return {"method": method, "workers": len(ranks), **asdict(cost), "ranks": ranks}


def show(task: str, method: str, cost: PipelineCost) -> None:
    """Print the cost as a table and sentences."""
    print_table(COLUMNS, [_row(rank) for rank in cost.ranks])
    for sentence in sentences(task, method, cost):
        console().print(sentence, soft_wrap=True, markup=False)


def _row(rank: RankCost) -> list[str]:
    return [
        str(rank.rank),
        " ".join(map(str, rank.stages)),
        f"{rank.parameters:,}",
        share_text(rank.work),
        share_text(rank.idle),
        bytes_text(rank.weights),
        bytes_text(rank.gradient),
        _known(rank.optimizer),
        f"{rank.versions}: {bytes_text(rank.version_bytes)}",
        f"{rank.in_flight}: {_known(rank.activations)}",
        _known(rank.total),
    ]


def _known(nbytes: int | None) -> str:
    return UNKNOWN if nbytes is None else bytes_text(nbytes)


def sentences(task: str, method: str, cost: PipelineCost) -> Iterator[str]:
    """What the table shows, in words."""
    parts = f"{cost.micro_batches} micro-batches" if cost.micro_batches > 1 else "one piece"
    yield f"{method} on {task}: mini-batches of {cost.batch_size} samples in {parts}."
    if cost.chosen:
        begins = ["", *(f", from layer {name}," for name in cost.chosen["cut"].split())]
        counts = [plural(replicas, "rank") for replicas in cost.chosen["stage_replicas"]]
        stages = [f"stage {s}{pair[0]} on {pair[1]}" for s, pair in enumerate(zip(begins, counts, strict=True))]
        yield f"Planned: {'; '.join(stages)}."
    yield (
        f"Its ranks are idle {share_text(cost.idle)} of the time, so that it is {cost.speedup:.2f} times as fast as "
        "one worker, if messages take no time."
    )
    yield (
        "Versions: how many versions of the weights a rank keeps, and the bytes of all but the live one. Activations: "
        "how many micro-batches are in flight, and the bytes that they keep for their backward passes."
    )
