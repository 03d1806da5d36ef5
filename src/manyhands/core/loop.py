"""The one training loop: what every rank of every method does in every world.

set up -> (take a mini-batch, step, record) until the budget is used up -> finish -> answer -> leave

A worker that comes later enters the budget that is under way, goes on from where the others are, and does the same.

A run with checkpoints is a row of such budgets: after each everyone rests, the lead saves, and all go on. Whatever was
in flight has then landed, so going on is the same as being resumed. Weights are evaluated in the same way; the record
says how long everyone paused, and what was sent meanwhile, so that reports can leave it out.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.core.budget import Budget, Open, Segment
from manyhands.core.choosing import rule_of
from manyhands.core.errors import Refused
from manyhands.core.footprint import footprint
from manyhands.core.gather import Gathered, gather, need_all
from manyhands.core.lines import Line
from manyhands.core.meeting import meet
from manyhands.core.protocols import (
    Batch,
    Finishes,
    Looks,
    Notes,
    Rests,
    Saved,
    Saves,
    Serves,
    Strategy,
    Transport,
    Weights,
    Welcomes,
)
from manyhands.core.saving import Snapshot, own, section, under
from manyhands.core.task import Task
from manyhands.core.worker import Layouts, Worker

GATHERINGS = 16
"""More than there are between two segments."""


@dataclass(frozen=True)
class Job:
    """Everything the ranks of a run have in common."""

    task: Task
    strategy: Strategy
    segments: Sequence[Segment]
    batches: Callable[[Transport, int], Iterator[Batch]]
    """A rank's mini-batches, from a position on."""
    observe: Callable[[Line], None]
    seed: int
    steps: int
    batch_size: int
    save: Callable[[Snapshot], None] | None = None
    """Called on the lead when the run is stopped, and after every segment if there are several to be saved."""
    saves_segments: bool = True
    resume: Snapshot | None = None
    evaluate: Callable[[Weights, Weights], float | None] | None = None
    """Called on the lead with weights and buffers, after segments that end with an evaluation."""

    def model(self) -> nn.Module:
        """This rank's own model; a model of sizes only can be one for all."""
        if not self.task.sizes_only:
            return self.task.build(self.seed)
        if not self._sizes:
            self._sizes.append(self.task.build(self.seed))
        return self._sizes[0]

    _sizes: list[nn.Module] = field(default_factory=list)
    layouts: Layouts = field(default_factory=dict)
    """How that one is laid out, for all."""


@dataclass(frozen=True)
class Outcome:
    """What one rank has to show in the end; weights and buffers on the lead only."""

    seconds: float
    weights: Weights | None = None
    buffers: Weights | None = None


def run_rank(job: Job, transport: Transport) -> Outcome:
    """The main program of one rank."""
    sizes = {"batch_size": job.batch_size, "data_size": len(job.task.data)}
    strategy = copy.deepcopy(job.strategy)
    rule = rule_of(strategy)
    layouts = job.layouts if job.task.sizes_only else None
    w = Worker(transport, job.task, job.model(), seed=job.seed, steps=job.steps, rule=rule, layouts=layouts, **sizes)
    if job.resume is not None:
        _load(w, job.resume)  # of a worker that comes later it is overwritten when it arrives
    if isinstance(strategy, Serves) and transport.role == "server":
        strategy.serve(w)
        return _leave(transport, Outcome(transport.now()))
    segments = job.segments if w.rank in w.workers else _enter(job, w)
    if not segments:
        return _leave(transport, Outcome(0.0))
    strategy.setup(w)
    if w.rank not in w.workers:
        _arrive(w, strategy, segments[0].budget)
    elif job.resume is not None and isinstance(strategy, Saves):
        strategy.restore(w, job.resume.state)
    _train(job, w, strategy, segments)
    if isinstance(strategy, Finishes):
        strategy.finish(w)
    seconds = transport.now()
    job.observe({"held": w.rank, "bytes": footprint(w, strategy)})
    weights = strategy.answer(w)
    return _leave(transport, Outcome(seconds, weights, average_buffers(w)))


def _enter(job: Job, w: Worker) -> Sequence[Segment]:
    """The segments that are left for a worker that comes later; none if it is too late. Others came before it."""
    begun = 0 if job.resume is None else job.resume.step
    for place, (stop, budget, *_) in enumerate(job.segments):
        assert isinstance(budget, Open), "who moves in lock step does not come later"
        taken = budget.enter(w.transport)
        w.crew = [*w.crew, *budget.arrivals]
        if taken is not None:
            w.step = w.came_at = begun + taken // len(w.workers)
            return job.segments[place:]
        begun = stop
    return ()


def _arrive(w: Worker, strategy: Strategy, budget: Budget) -> None:
    assert isinstance(strategy, Welcomes) and isinstance(budget, Open)
    strategy.arrive(w)
    budget.arrived(w.transport)


@torch.no_grad()
def _train(job: Job, w: Worker, strategy: Strategy, segments: Sequence[Segment]) -> None:
    """Segment after segment. Only models are run with gradients: see `Worker` and `Stage`."""
    batches = job.batches(w.transport, w.step)
    notes: Callable[[], Mapping[str, Any]] = strategy.notes if isinstance(strategy, Notes) else dict
    for segment in segments:
        w.gatherings = _first_gathering(segment.stop)
        while segment.budget.grant(w.transport):
            batch = next(batches)
            w.spent.begin()
            loss = strategy.step(w, batch)
            w.step += 1
            job.observe(_line(w, loss, notes()))
        if came := [rank for rank in segment.budget.arrivals if rank not in w.crew]:
            w.crew = [*w.crew, *came]
        _pause(job, w, strategy, segment)
        if segment.budget.stopped:
            return


def _first_gathering(stop: int) -> int:
    """The number of the first gathering after a segment, the same for all, however many they have seen before."""
    return stop * GATHERINGS


def _leave(transport: Transport, outcome: Outcome) -> Outcome:
    transport.leave()
    return outcome


def _line(w: Worker, loss: float | None, notes: Mapping[str, Any]) -> Line:
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
        **w.spent.facts(),
        **notes,
    }


# -- checkpoints and evaluations -----------------------------------------------------------------------


def _pause(job: Job, w: Worker, strategy: Strategy, segment: Segment) -> None:
    """Everyone rests, the lead saves or evaluates, everyone goes on."""
    stopped = segment.budget.stopped
    saves = job.save is not None and (stopped or (job.saves_segments and segment.saves))
    evaluates = job.evaluate is not None and segment.evaluates and not stopped
    if not saves and not evaluates:
        return
    began, sent = w.transport.now(), w.transport.bytes_sent
    evaluate = partial(_evaluate, job, w, segment.stop) if evaluates else None
    if not saves and isinstance(strategy, Looks) and strategy.looks:
        _look(w, strategy, evaluate)
    else:
        _rest(job, w, strategy, None if stopped else segment.stop, evaluate, saves)
    job.observe({"paused": w.rank, "from": began, "to": w.transport.now(), "bytes": w.transport.bytes_sent - sent})


Evaluate = Callable[[Weights, Weights], None]


def _evaluate(job: Job, w: Worker, step: int, weights: Weights, buffers: Weights) -> None:
    assert job.evaluate is not None
    found = job.evaluate(weights, buffers)
    job.observe({"evaluated": step, "time": w.transport.now(), "accuracy": found})


def _look(w: Worker, strategy: Looks, evaluate: Evaluate | None) -> None:
    """Everyone waits between two steps; the lead reads the weights where they are, and nothing else changes."""
    gathered = _gather_buffers(w)
    if gathered is not None and evaluate is not None:
        evaluate(strategy.look(w), _merged(gathered))
    meet(w)


def _rest(job: Job, w: Worker, strategy: Strategy, step: int | None, evaluate: Evaluate | None, saves: bool) -> None:
    """Everyone rests, so that nothing is in flight; without a `step` what is saved is as far as they have come."""
    if isinstance(strategy, Rests):
        strategy.rest(w)
    state = strategy.state(w) if saves and isinstance(strategy, Saves) else None
    weights = strategy.answer(w)
    gathered = _gather_buffers(w)
    if weights is not None and gathered is not None:
        if job.save is not None and state is not None:
            job.save(_snapshot(step, w, strategy, weights, state, gathered))
        if evaluate is not None:
            evaluate(weights, _merged(gathered))
    meet(w)
    if saves:
        _draw_anew(w)
    if isinstance(strategy, Rests):
        strategy.go_on(w)


def _snapshot(
    step: int | None, w: Worker, strategy: Strategy, weights: Weights, state: Saved, gathered: Gathered
) -> Snapshot:
    """All there is to save. Without a `step` it is as far as the workers have come."""
    positions = {rank: meta[0] for rank, (meta, _) in gathered.items()}
    for rank, ((_, _, *names), tensors) in gathered.items():
        state |= under(f"worker{rank}/buffer", dict(zip(names, tensors, strict=True)))
    if step is None:
        taken = [meta[1] for meta, _ in gathered.values()]
        step = max(taken) if strategy.lockstep else sum(taken) // len(w.workers)
    return Snapshot(step, weights, _merged(gathered), state, positions)


@torch.no_grad()
def _load(w: Worker, snapshot: Snapshot) -> None:
    """The model and the worker as they were; its own buffers, or everyone's mean if it is new."""
    parameters, buffers = dict(w.model.named_parameters()), dict(w.model.named_buffers())
    _refuse_misfit(parameters, snapshot.weights)
    _refuse_misfit(buffers, snapshot.buffers)
    saved = {**snapshot.weights, **snapshot.buffers, **section(own(w, snapshot.state), "buffer")}
    for name, x in {**parameters, **buffers}.items():
        x.copy_(saved[name])
    w.step = snapshot.positions.get(w.rank, snapshot.step)
    _draw_anew(w)


def _refuse_misfit(mine: Weights, saved: Weights) -> None:
    shapes, given = ({name: tuple(x.shape) for name, x in some.items()} for some in (mine, saved))
    for name in sorted(shapes.keys() | given.keys()):
        if shapes.get(name) != given.get(name):
            has, had = (some.get(name, "missing") for some in (shapes, given))
            raise Refused(f"{name} is {has} in the model, but must be {had} as in the checkpoint")


def _draw_anew(w: Worker) -> None:
    """Let a worker's random choices depend on where it is, not on how it came there."""
    w.random.seed(f"{w.seed}/{w.rank}/{w.step}")


# -- buffers -------------------------------------------------------------------------------------------


def _gather_buffers(w: Worker) -> Gathered | None:
    """The buffers of what each worker trains, where it is, and how many steps it has taken itself."""
    mine = {id(buffer) for buffer in w.trains.buffers()}
    named = {name: b for name, b in w.model.named_buffers() if id(b) in mine}
    return gather(w, (w.step, w.step - w.came_at, *named), tuple(named.values()))


def average_buffers(w: Worker) -> Weights | None:
    """Float buffers (BatchNorm's statistics) averaged over the workers that train them; of integers the maximum."""
    if not any(True for _ in w.model.buffers()) or w.task.sizes_only:
        return {}
    gathered = _gather_buffers(w)
    if gathered is None:
        return None
    if w.trains is not w.model:
        need_all(w, gathered)
    return _merged(gathered)


@torch.no_grad()
def _merged(gathered: Gathered) -> dict[str, Tensor]:
    """Whoever has not taken a step has statistics of nothing, so it has no say."""
    found: dict[str, list[Tensor]] = {}
    has_stepped = any(taken for (_, taken, *_), _ in gathered.values())
    for (_, _, *names), tensors in (one for one in gathered.values() if one[0][1] or not has_stepped):
        for name, tensor in zip(names, tensors, strict=True):
            found.setdefault(name, []).append(tensor)
    return {
        name: torch.stack(ts).mean(0) if ts[0].is_floating_point() else torch.stack(ts).amax(0)
        for name, ts in found.items()
    }
