"""A plan carried out by real processes of this machine: one per rank, started here, watched over from here."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from manyhands import tasks
from manyhands.core.agreement import refuse_unlike
from manyhands.core.budget import Budget, Segment, segments
from manyhands.core.lines import Line, encoded
from manyhands.core.loop import Job, Outcome, run_rank
from manyhands.core.protocols import Transport
from manyhands.core.task import Task
from manyhands.plan import Plan
from manyhands.runtime.budget import Common, Pace
from manyhands.runtime.launch import Launched, launch
from manyhands.runtime.resuming import saver
from manyhands.runtime.transport import RealTransport

EVERY = 0.1
"""Seconds between two parcels of lines for the record."""


@dataclass(frozen=True)
class Named:
    """A task that every rank loads by itself, by its name."""

    name: str
    data: Path | None = None

    def load(self) -> Task:
        return tasks.load(self.name, self.data)


@dataclass(frozen=True)
class Done:
    """What one rank hands back."""

    outcome: Outcome
    bytes_sent: int
    stopped_at: int | None
    """The step at which the run was stopped early, if it was."""


def run_plan(plan: Plan, named: Named | None, on_lines: Callable[[bytes], None]) -> Launched:
    """Carry it out; `on_lines` takes the lines of every rank for the record, encoded."""
    where = plan.machines
    program = Part(plan if named is None else replace(plan, task=_nothing), named)
    return launch(
        program,
        workers=where.workers,
        servers=where.servers,
        link=where.link,
        bind=where.bind,
        on_lines=lambda parcels: on_lines(*parcels),
        spares=where.newcomers,
    )


@dataclass(frozen=True)
class Part:
    """One rank's part of a plan, as it is sent to its process."""

    plan: Plan
    named: Named | None

    def __call__(self, transport: Transport) -> Done:
        assert isinstance(transport, RealTransport)
        plan = self.plan if self.named is None else replace(self.plan, task=self.named.load())
        lines = Lines(transport)
        stretches = _segments(plan, transport)
        job = Job(
            plan.task,
            plan.strategy,
            stretches,
            plan.batches,
            lines.add,
            plan.seed,
            plan.steps,
            plan.batch_size,
            save=None if plan.checkpoints is None else saver(plan.checkpoints, plan.terms),
            saves_segments=plan.checkpoint_every is not None,
            resume=plan.resume,
            evaluate=None if plan.evaluate_every is None else plan.evaluate,
        )
        if transport.rank not in transport.late:
            refuse_unlike(transport, job.model())
        outcome = run_rank(job, transport)
        lines.send()
        taken = lines.number if transport.rank in transport.late else lines.step
        stopped = next((taken for one in stretches if one.budget.stopped), None)
        return Done(outcome, transport.bytes_sent, stopped)


def _segments(plan: Plan, transport: RealTransport) -> list[Segment]:
    pace, numbers = Pace(transport), iter(range(plan.steps + 1))

    def budget(steps: int) -> Budget:
        if plan.lockstep:
            return pace.budget(steps)
        return Common(transport, steps * plan.replicas, f"budget{next(numbers)}")

    if transport.role == "server":
        return []
    return segments(plan.start, plan.steps, plan.checkpoint_every, budget, plan.evaluate_every)


class Lines:
    """Lines for the record, encoded and sent in parcels: many at once cost a third of what they cost one by one, when
    each time the caches are full of a step."""

    def __init__(self, transport: RealTransport) -> None:
        self._member = transport.member
        self._rows: list[Line] = []
        self._sent = time.monotonic()
        self.step = self.number = 0

    def add(self, line: Line) -> None:
        """One more step, or something else that happened."""
        if "step" in line:
            self.step = line["step"]
            self.number += 1
        self._rows.append(line)
        if time.monotonic() - self._sent > EVERY:
            self.send()

    def send(self) -> None:
        """Hand over what there is."""
        if self._rows:
            self._member.tell([b"".join(map(encoded, self._rows))])
            self._rows = []
        self._sent = time.monotonic()


_nothing: Any = None
