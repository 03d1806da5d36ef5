"""The one training loop: what every rank of every method does in every world.

set up -> (take a mini-batch, step, record) until the budget is used up -> finish -> answer -> leave
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.core.budget import Budget
from manyhands.core.gather import Gathered, gather, need_all
from manyhands.core.protocols import Batch, Finishes, Serves, Strategy, Transport, Weights
from manyhands.core.task import Task
from manyhands.core.worker import Worker

Line = dict[str, Any]
"""One line of the record."""


@dataclass(frozen=True)
class Job:
    """Everything the ranks of a run have in common."""

    task: Task
    strategy: Strategy
    budget: Budget
    batches: Callable[[Transport], Iterator[Batch]]
    observe: Callable[[Line], None]
    seed: int
    steps: int
    batch_size: int

    def model(self) -> nn.Module:
        """This rank's own model; a model of sizes only can be one for all."""
        if not self.task.sizes_only:
            return self.task.build(self.seed)
        if not self._sizes:
            self._sizes.append(self.task.build(self.seed))
        return self._sizes[0]

    _sizes: list[nn.Module] = field(default_factory=list)


@dataclass(frozen=True)
class Outcome:
    """What one rank has to show in the end; weights and buffers on the lead only."""

    seconds: float
    weights: Weights | None = None
    buffers: Weights | None = None


def run_rank(job: Job, transport: Transport) -> Outcome:
    """The main program of one rank."""
    w = Worker(transport, job.task, job.model(), seed=job.seed, steps=job.steps, batch_size=job.batch_size)
    strategy = copy.deepcopy(job.strategy)
    if isinstance(strategy, Serves) and transport.role == "server":
        strategy.serve(w)
        return _leave(transport, Outcome(transport.now()))
    strategy.setup(w)
    batches = job.batches(transport)
    while job.budget.grant(transport):
        loss = strategy.step(w, next(batches))
        w.step += 1
        job.observe(_line(w, loss))
    if isinstance(strategy, Finishes):
        strategy.finish(w)
    seconds = transport.now()
    weights = strategy.answer(w)
    return _leave(transport, Outcome(seconds, weights, average_buffers(w)))


def _leave(transport: Transport, outcome: Outcome) -> Outcome:
    transport.leave()
    return outcome


def _line(w: Worker, loss: float | None) -> Line:
    t = w.transport
    return {
        "step": w.step,
        "rank": w.rank,
        "time": t.now(),
        "loss": None if loss is None or math.isnan(loss) else loss,
        "samples": w.batch_size,
        "bytes": t.bytes_sent,
        "lag": w.lag,
        "waited": t.waited(),
    }


def average_buffers(w: Worker) -> Weights | None:
    """Float buffers (BatchNorm's statistics) averaged over the workers that train them; of integers the maximum."""
    mine = {id(buffer) for buffer in w.trains.buffers()}
    named = {name: b for name, b in w.model.named_buffers() if id(b) in mine}
    if not any(True for _ in w.model.buffers()) or w.task.sizes_only:
        return {}
    gathered = gather(w, tuple(named), tuple(named.values()))
    if gathered is None:
        return None
    if w.trains is not w.model:
        need_all(w, gathered)
    return _merged(gathered)


@torch.no_grad()
def _merged(gathered: Gathered) -> dict[str, Tensor]:
    found: dict[str, list[Tensor]] = {}
    for names, tensors in gathered.values():
        for name, tensor in zip(names, tensors, strict=True):
            found.setdefault(name, []).append(tensor)
    return {
        name: torch.stack(ts).mean(0) if ts[0].is_floating_point() else torch.stack(ts).amax(0)
        for name, ts in found.items()
    }
