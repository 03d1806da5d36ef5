"""The life of a rank: what every rank of every method does, in real processes and in virtual time.

    begin -> step -> step -> ... -> pause -> step -> ... -> end
                                    save,
                                    evaluate

`RankRun` is this life cycle of a worker. Two programs drive it: `run_rank` below, for `mh.train`, and the user's own
loop (`mh.join`, run/training.py). Ranks with another role, such as servers, run the program that the strategy has for
that role.

`mh.train` divides a run into segments, each with a budget of mini-batches. At the end of a segment all workers pause:
once nothing is in flight, the lead saves a checkpoint or evaluates the weights. A run that continues after a checkpoint
therefore equals one that is resumed from it. The record says how long each pause took and what was sent in it, so that
reports can leave it out. A worker that joins later enters the current segment and continues from the others' weights
and buffers.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from manyhands.core.barrier import barrier
from manyhands.core.budget import JoinableBudget, Segment
from manyhands.core.buffers import (
    average_buffers,
    gather_buffers,
    inherit_buffers,
    merge_buffers,
    note_statistics,
    offer_buffers,
)
from manyhands.core.declared_state import load_state, save_state
from manyhands.core.errors import NotWritten
from manyhands.core.footprint import by_purpose
from manyhands.core.gather import Gathered
from manyhands.core.lag import NO_LAG, UNKNOWN_LAG
from manyhands.core.param_groups import rule_of
from manyhands.core.port import Transport
from manyhands.core.record import Line
from manyhands.core.snapshot import load_snapshot, reseed, take_snapshot
from manyhands.core.state import Snapshot
from manyhands.core.strategy import Batch, Strategy, Weights
from manyhands.core.task import Task
from manyhands.core.team import release_untrained, team_size
from manyhands.core.worker import Layouts, Worker

GATHERS_PER_SEGMENT = 16
"""More than there are between two segments."""

Save = Callable[[Snapshot], None]
Evaluate = Callable[[Weights, Weights], float | None]
"""The metric for weights and buffers."""


@dataclass(frozen=True)
class Job:
    """What all ranks of a run have in common."""

    task: Task
    strategy: Strategy
    segments: Sequence[Segment]
    batches: Callable[[Transport, int], Iterator[Batch]]
    """The mini-batches of a rank, from a position on."""
    observe: Callable[[Line], None]
    seed: int
    steps: int
    batch_size: int
    save: Save | None = None
    """Called on the lead when the run is stopped early, and at the end of segments that end with a checkpoint."""
    saves_segments: bool = True
    resume: Snapshot | None = None
    evaluate: Evaluate | None = None
    """Called on the lead at the end of segments that end with an evaluation."""

    def model(self) -> nn.Module:
        """A new model for a rank; all ranks of a process share one if it has sizes only."""
        if not self.task.sizes_only:
            return self.task.build(self.seed)
        if not self._sizes:
            self._sizes.append(self.task.build(self.seed))
        return self._sizes[0]

    _sizes: list[nn.Module] = field(default_factory=list)
    layouts: Layouts = field(default_factory=dict)
    """The flat layouts of that shared model."""


@dataclass(frozen=True)
class Outcome:
    """The result of one rank; weights and buffers on the lead only."""

    seconds: float
    weights: Weights | None = None
    buffers: Weights | None = None
    unsaved: str = ""
    """Why the last checkpoint could not be written, if it could not; only where it was to be written."""


# -- the life cycle of a worker ------------------------------------------------------------------------


class RankRun:
    """A worker and its strategy, from begin to end.

    Args:
        worker: this rank, with its model.
        strategy: the method; a copy of its own for each rank.
        observe: takes a line for the record after each step, pause and evaluation; None: no record is kept.
    """

    def __init__(self, worker: Worker, strategy: Strategy, observe: Callable[[Line], None] | None = None) -> None:
        self.worker = worker
        self.strategy = strategy
        self.lead = worker.workers[0]
        """The rank that got the answer, known after `end`."""
        self.observe = observe
        """What takes the lines."""
        self.usual_lag = NO_LAG if strategy.traits.lag == "always 0" else UNKNOWN_LAG

    def begin(self, resume: Snapshot | None = None, *, joins: bool = False) -> None:
        """Set up; then restore the state of a checkpoint, or catch up with a run that has begun already."""
        offer_buffers(self.worker)
        self.strategy.setup(self.worker)
        if joins:
            inherit_buffers(self.worker)
            self.strategy.join_running(self.worker)
        elif resume is not None:
            load_state(self.worker, self.strategy, resume.state)

    def step(self, batch: Batch) -> float | None:
        """Consume one mini-batch; the newest known loss. Call it without autograd: only models run with gradients."""
        w = self.worker
        w.timer.begin()
        w.lag = self.usual_lag
        loss = self.strategy.step(w, batch)
        w.step += 1
        if self.observe is not None:
            self.observe(_line(w, loss, self.strategy.notes()))
        return loss

    def pause(self, step: int | None, save: Save | None, evaluate: Evaluate | None) -> None:
        """Save and evaluate on the lead while no worker is in a step; an evaluation alone may only `peek`.

        `step` counts updates of all workers together; None: as many as they have taken.
        """
        t = self.worker.transport
        began, sent = t.now(), t.bytes_sent
        if save is None and self.strategy.traits.peekable:
            self._peek(step, evaluate)
        else:
            self._quiesce(step, save, evaluate)
        line = {"kind": "pause", "paused": t.rank, "from": began, "to": t.now(), "bytes": t.bytes_sent - sent}
        self.write(line)

    def _peek(self, step: int | None, evaluate: Evaluate | None) -> None:
        """All workers wait between two steps; the lead reads the weights and changes nothing."""
        gathered = gather_buffers(self.worker)
        if gathered is not None and evaluate is not None:
            self._evaluate(step, evaluate, self.strategy.peek(self.worker), gathered)
        barrier(self.worker)

    def _quiesce(self, step: int | None, save: Save | None, evaluate: Evaluate | None) -> None:
        """All workers complete what is in flight; the lead saves and evaluates; all begin again."""
        w, strategy = self.worker, self.strategy
        strategy.quiesce(w)
        state = None if save is None else save_state(w, strategy)
        weights = strategy.answer(w)
        gathered = gather_buffers(w)
        if weights is not None and gathered is not None:
            if save is not None and state is not None:
                save(take_snapshot(step, w, strategy, weights, state, gathered))
            if evaluate is not None:
                self._evaluate(step, evaluate, weights, gathered)
        barrier(w)
        if save is not None:
            reseed(w)
        strategy.resume(w)

    def _evaluate(self, step: int | None, evaluate: Evaluate, weights: Weights, gathered: Gathered) -> None:
        accuracy = evaluate(weights, merge_buffers(self.worker, gathered))
        now = self.worker.transport.now()
        self.write({"kind": "evaluation", "evaluated": step, "time": now, "accuracy": accuracy})

    def end(self) -> Outcome:
        """Complete what is in flight, and gather the answer at the lead."""
        w = self.worker
        self.strategy.finish(w)
        self.lead, seconds = w.lead, w.transport.now()
        if self.observe is not None:
            self.observe(_memory(w, self.strategy))
        weights = self.strategy.answer(w)
        return Outcome(seconds, weights, average_buffers(w))

    def write(self, line: Line) -> None:
        """Add a line to the record, if one is kept."""
        if self.observe is not None:
            self.observe(line)


def _memory(w: Worker, strategy: Strategy) -> Line:
    """What a worker keeps, as the record shows it."""
    return {
        "kind": "memory",
        "held": w.rank,
        **by_purpose(w, strategy),
        "versions": w.versions,
        "version_bytes": w.version_bytes,
        "activations": w.activations,
    }


def _line(w: Worker, loss: float | None, notes: Mapping[str, Any]) -> Line:
    """A step, as the record shows it."""
    t = w.transport
    return {
        "kind": "step",
        "step": w.step,
        "rank": w.rank,
        "time": t.now(),
        "loss": None if loss is None or math.isnan(loss) else loss,
        "samples": w.samples_in_step or w.batch_size,
        "bytes": t.bytes_sent,
        **w.lag.fields(),
        "waited": t.waited(),
        **w.timer.facts(),
        **notes,
    }


# -- the program of a rank in a managed run ------------------------------------------------------------


def run_rank(job: Job, transport: Transport) -> Outcome:
    """Run the program of this rank's role, with a worker and a strategy of its own, and leave."""
    strategy = copy.deepcopy(job.strategy)
    w = Worker(
        transport,
        job.task,
        job.model(),
        seed=job.seed,
        steps=job.steps,
        batch_size=job.batch_size,
        data_size=len(job.task.data),
        rule=rule_of(strategy),
        team_size=team_size(strategy, transport),
        layouts=job.layouts if job.task.sizes_only else None,
    )
    note_statistics(w)
    if job.resume is not None:
        load_snapshot(w, job.resume)
    programs: Mapping[str, Callable[[Worker], Outcome | None]]
    programs = {**strategy.programs(), "worker": partial(_work, job, strategy)}
    outcome = programs[transport.role](w) or Outcome(transport.now())
    transport.leave()
    return outcome


def _work(job: Job, strategy: Strategy, w: Worker) -> Outcome:
    """The program of a worker: all segments of the run, or those that are left when it joins."""
    joins = w.rank not in w.workers
    segments = _join(job, w) if joins else job.segments
    if not segments:
        return Outcome(0.0)
    run = RankRun(w, strategy, job.observe)
    run.begin(job.resume, joins=joins)
    release_untrained(w)
    segments = [segment._replace(budget=strategy.share_budget(segment.budget)) for segment in segments]
    if joins:
        _joinable(segments[0]).arrived(w.transport)
    unsaved = _train(job, run, segments)
    return replace(run.end(), unsaved=unsaved)


def _join(job: Job, w: Worker) -> Sequence[Segment]:
    """Enter the segment that is under way; the segments that are left, none if the run is about to end."""
    begun = 0 if job.resume is None else job.resume.step
    for number, segment in enumerate(job.segments):
        budget = _joinable(segment)
        taken = budget.enter(w.transport)
        w.members = [*w.members, *budget.arrivals]
        if taken is not None:
            w.step = w.joined_at = begun + taken // len(w.workers)
            return job.segments[number:]
        begun = segment.stop
    return ()


def _joinable(segment: Segment) -> JoinableBudget:
    assert isinstance(segment.budget, JoinableBudget), "workers cannot join a run in lock step"
    return segment.budget


@torch.no_grad()
def _train(job: Job, run: RankRun, segments: Sequence[Segment]) -> str:
    """Take mini-batches as long as the budget of a segment grants them, then pause; segment after segment.

    Returns why the last checkpoint could not be written, if it could not.
    """
    w, unsaved = run.worker, ""
    batches = job.batches(w.transport, w.step)
    for segment in segments:
        w.gather_round = segment.stop * GATHERS_PER_SEGMENT  # the same number for workers that have joined
        while segment.budget.grant(w.transport):
            run.step(next(batches))
        if joined := [rank for rank in segment.budget.arrivals if rank not in w.members]:
            w.members = [*w.members, *joined]
        unsaved = _pause(job, run, segment)
        if segment.budget.stopped:
            break
        if unsaved and segment is not segments[-1]:
            run.write({"kind": "unsaved", "unsaved": segment.stop, "time": w.transport.now(), "why": unsaved})
    return unsaved


def _pause(job: Job, run: RankRun, segment: Segment) -> str:
    """Pause if a checkpoint or an evaluation is due: a run that is stopped early is saved, but not evaluated.

    A run does not fail in the middle because its disk is full. Returns why a checkpoint could not be written.
    """
    failures: list[NotWritten] = []
    stopped = segment.budget.stopped
    save = job.save if stopped or (job.saves_segments and segment.saves) else None
    evaluate = job.evaluate if segment.evaluates and not stopped else None
    if save is not None or evaluate is not None:
        attempt = None if save is None else partial(_attempt, save, failures)
        run.pause(None if stopped else segment.stop, attempt, evaluate)
    return str(failures[0]) if failures else ""


def _attempt(save: Save, failures: list[NotWritten], snapshot: Snapshot) -> None:
    try:
        save(snapshot)
    except NotWritten as error:
        failures.append(error)
