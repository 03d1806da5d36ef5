"""What `manyhands cost --method` predicts of a pipeline against what runs with two real stages measure."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean, median
from typing import Any

import torch
from _models import LEARNING_RATE, SEED
from _ranks import RANKS
from _side_by_side import say
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import manyhands as mh
from manyhands.core.strategy import Strategy
from manyhands.cost.pipelines import PipelineCost, pipeline_cost
from manyhands.strategies.pipeline_plan import pipeline_plan

WIDTH, LAYERS, SAMPLES = 1024, 8, 256
STEPS, SKIPPED = 12, 2
"""Of each run; the first steps connect, allocate and measure memory."""
KINDS = ("weights", "gradient", "optimizer", "version_bytes", "activations")
BUBBLES: dict[str, Callable[[], Strategy]] = {
    f"{name} in {count}": lambda make=make, count=count: make(micro_batches=count, lr=LEARNING_RATE)  # type: ignore[misc]
    for count in (8, 16)
    for name, make in {"gpipe": mh.gpipe, "1f1b": mh.one_f_one_b}.items()
}
MEMORIES: dict[str, Callable[[], Strategy]] = {
    "gpipe": lambda: mh.gpipe(micro_batches=8),
    "gpipe, graphs": lambda: mh.gpipe(micro_batches=8, replay=False),
    "1f1b": lambda: mh.one_f_one_b(micro_batches=8),
    "pipedream": mh.pipedream,
    "pipedream-2bw": mh.pipedream_2bw,
    "weight-copies": mh.weight_copies,
}


def task() -> mh.Task:
    """The layers and samples of the other lines."""

    def model() -> nn.Module:
        layers = [part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
        return nn.Sequential(*layers[:-1])

    numbers = torch.Generator().manual_seed(SEED)
    xs = torch.randn(4 * SAMPLES, WIDTH, generator=numbers)
    ys = torch.randint(WIDTH, (4 * SAMPLES,), generator=numbers)
    return mh.Task(model, TensorDataset(xs, ys), functional.cross_entropy, batch_size=SAMPLES, name="linear layers")


def bubble_error(steps: int = STEPS) -> dict[str, Any]:
    """The largest difference of a predicted idle share from the measured one: waiting over waiting and computing."""
    errors = {}
    for name, make in BUBBLES.items():
        predicted, result = _both(make(), steps)
        idle = fmean(_idle(result, rank) for rank in range(RANKS))
        errors[name] = abs(idle - predicted.idle)
        say(f"  {name}: predicted {predicted.idle:.3f} idle, measured {idle:.3f}")
    return {"name": "bubble-error", "value": round(max(errors.values()), 3), "errors": errors, "goal": "<= 0.10"}


def _idle(result: mh.Result, rank: int) -> float:
    """The share of a rank's time in which it waits: the median of its steps."""
    lines = [line for line in result.records if line["kind"] == "step" and line["rank"] == rank]
    return median(line["wait"] / (line["wait"] + line["compute"]) for line in lines[SKIPPED:])


def memory_error(steps: int = STEPS) -> dict[str, Any]:
    """The largest relative difference of predicted bytes of a rank from the measured ones."""
    errors = {}
    for name, make in MEMORIES.items():
        predicted, result = _both(make(), steps)
        pairs = [
            (getattr(rank, kind) or 0, line[kind] or 0)
            for rank, line in zip(predicted.ranks, result.memory, strict=True)
            for kind in KINDS
        ]
        errors[name] = max(abs(guess - found) / max(found, guess, 1) for guess, found in pairs)
        say(f"  {name}: predicted bytes are {100 * errors[name]:.2f} % off at most")
    return {"name": "memory-error", "value": round(max(errors.values()), 3), "errors": errors, "goal": "<= 0.10"}


def _both(strategy: Strategy, steps: int) -> tuple[PipelineCost, mh.Result]:
    plan = pipeline_plan(strategy, RANKS)
    assert plan is not None
    return pipeline_cost(task(), plan), mh.train(task(), strategy, workers=RANKS, steps=steps)
