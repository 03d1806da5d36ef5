"""RunSpec: a run with every default filled in and everything checked, before anything is started.

    mh.train(...), mh.compare(...)  ->  make_spec  ->  RunSpec  ->  spec.engine.run(spec, observe)

It is built once and handed down whole. Engines send it to their ranks, which read from it what they need.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path
from typing import Any

from manyhands import tasks
from manyhands.core.errors import Refused, refuse_unless
from manyhands.core.port import Transport
from manyhands.core.state import Snapshot
from manyhands.core.strategy import Batch, Strategy, Weights
from manyhands.core.task import Task
from manyhands.engines.engine import Engine
from manyhands.run.result import evaluate
from manyhands.runtime.resume import CHECKPOINTS, folder_of, refuse_to_mix, resumed
from manyhands.splits.data import Share


@dataclass(frozen=True)
class NamedTask:
    """A task that every process loads by its name, so that its data need not be sent."""

    name: str
    data: Path | None = None

    def load(self) -> Task:
        return tasks.load(self.name, self.data)


@dataclass(frozen=True)
class RunSpec:
    """What is trained, how, where and for how long.

    Args:
        task: the task, loaded.
        strategy: the method.
        engine: where the run takes place.
        roles: how many ranks of each role the run begins with: {"worker": 4, "server": 1}.
        seed: everything random depends on it.
        steps: updates of size replicas x batch_size.
        batch_size: samples per mini-batch of one worker.
        per_worker: every worker takes `steps` mini-batches, however fast it is.
        out: the folder of the record and the checkpoints.
        checkpoints: the folder of the checkpoints; None if nothing is saved.
        checkpoint_every: steps between two checkpoints; None: one only if the run is stopped.
        evaluate_every: steps between two evaluations.
        resume: the state from which the run continues.
        named: how processes load the task; None if it is sent to them.
    """

    task: Task
    strategy: Strategy
    engine: Engine
    roles: Mapping[str, int]
    seed: int
    steps: int
    batch_size: int
    per_worker: bool = False
    out: Path | None = None
    checkpoints: Path | None = None
    checkpoint_every: int | None = None
    evaluate_every: int | None = None
    resume: Snapshot | None = None
    named: NamedTask | None = None

    @property
    def workers(self) -> int:
        return self.roles["worker"]

    @property
    def servers(self) -> int:
        return self.roles.get("server", 0)

    @property
    def replicas(self) -> int:
        """How many copies of the model the workers hold together."""
        return self.strategy.replicas(self.workers)

    def replica(self, rank: int) -> int:
        """The copy of the model that a worker trains, alone or as a part of it."""
        return rank * self.replicas // self.workers

    def is_last_of_replica(self, rank: int) -> bool:
        """Whether no later rank trains the same copy: of those that divide a model it knows the loss first."""
        return rank >= self.workers or (rank + 1) * self.replicas % self.workers == 0

    @property
    def lockstep(self) -> bool:
        """Whether every worker takes the same number of mini-batches."""
        return self.strategy.traits.lockstep or self.per_worker

    @property
    def start(self) -> int:
        """The step at which the run begins: 0, or that of the checkpoint."""
        return 0 if self.resume is None else self.resume.step

    @property
    def samples(self) -> int:
        """How many samples the run consumes."""
        return (self.steps - self.start) * self.replicas * self.batch_size

    @property
    def remarks(self) -> list[str]:
        """Where the method will differ from what its knobs say."""
        return [*self.strategy.remarks(self.steps)]

    @property
    def role_of_rank(self) -> list[str]:
        """The role of every rank, those that may join later included."""
        counts = {**self.roles, "worker": self.workers + self.engine.joiners}
        return [role for role, count in counts.items() for _ in range(count)]

    def evaluate(self, weights: Weights, buffers: Weights) -> float | None:
        """The task's metric on its test data."""
        return evaluate(self.task, weights, buffers, self.seed)

    def batches(self, transport: Transport, position: int) -> Iterator[Batch]:
        """This rank's mini-batches from a position on; all ranks of one replica get the same."""
        if self.task.sizes_only:
            return repeat(())
        if transport.rank in transport.pending_ranks:  # no shard of the data is left for it: it draws from all
            replica, replicas, whole = transport.rank, transport.roles.count("worker"), True
        else:
            replica, replicas = self.replica(transport.rank), self.replicas
            whole = self.strategy.traits.draws_from_all
        share = Share(self.task.data, replica, replicas, self.batch_size, self.seed, whole=whole)
        share.position = position
        return iter(share.next_batch, None)

    def packed(self) -> RunSpec:
        """This spec as it is sent to other processes: without a task that they load themselves."""
        return self if self.named is None else replace(self, task=_NO_TASK)

    def unpacked(self) -> RunSpec:
        """The spec as it was before `packed`."""
        return self if self.named is None else replace(self, task=self.named.load())


_NO_TASK: Any = None


def make_spec(
    task: Task | str,
    strategy: Strategy,
    engine: Engine,
    *,
    data: str | Path | None = None,
    seed: int = 0,
    steps: int | None = None,
    epochs: float | None = None,
    batch_size: int | None = None,
    per_worker: bool = False,
    out: str | Path | None = None,
    checkpoint_every: int | None = None,
    resume: str | Path | None = None,
    evaluate_every: int | None = None,
) -> RunSpec:
    """Fill in the defaults, and refuse what cannot work; the arguments are those of `mh.train`."""
    named = NamedTask(task, None if data is None else Path(data)) if isinstance(task, str) else None
    loaded = task if named is None else named.load()
    assert isinstance(loaded, Task)
    engine = engine.fit(strategy.traits)
    steps, batch_size = run_length(loaded, strategy.replicas(engine.roles["worker"]), steps, epochs, batch_size)
    spec = RunSpec(
        loaded,
        strategy,
        engine,
        engine.roles,
        seed,
        steps,
        batch_size,
        per_worker,
        out=None if out is None else Path(out),
        checkpoint_every=checkpoint_every,
        evaluate_every=evaluate_every,
        named=named,
    )
    _refuse_misfit(spec)
    _refuse_evaluations(spec)
    return _with_checkpoints(spec, resume)


def run_length(
    task: Task, replicas: int, steps: int | None, epochs: float | None, batch_size: int | None
) -> tuple[int, int]:
    """How many steps a run has, and the samples per mini-batch: what was given, or the task's defaults."""
    if steps is not None and epochs is not None:
        raise Refused(f"steps is {steps} and epochs is {epochs}, but only one of them can be given")
    batch_size = task.batch_size if batch_size is None else batch_size
    refuse_unless(batch_size >= 1, "batch_size", batch_size, ">= 1")
    if steps is None:
        epochs = task.epochs if epochs is None else epochs
        refuse_unless(0 < epochs < math.inf, "epochs", epochs, "> 0 and finite")
        steps = max(1, math.floor(epochs * len(task.data) / (replicas * batch_size)))
    refuse_unless(steps >= 1, "steps", steps, ">= 1")
    return steps, batch_size


def _refuse_misfit(spec: RunSpec) -> None:
    """Refuse a task, an engine or roles that the method cannot work with."""
    samples, traits, joiners = len(spec.task.data), spec.strategy.traits, spec.engine.joiners
    bound = f">= {spec.replicas}, the number of workers"
    refuse_unless(samples >= spec.replicas, "the number of samples", samples, bound)
    has_data = spec.engine.world == "virtual" or not spec.task.sizes_only
    refuse_unless(has_data, "the task", spec.task.name, "one with data: sizes only are for virtual time")
    refuse_unless(traits.servers or not spec.servers, "servers", spec.servers, "0: this method has none")
    alone = spec.replicas == spec.workers or not spec.engine.fixes_order
    bound = f"{spec.workers}, one for each: the cluster prescribes the order in which they compute"
    refuse_unless(alone, f"the number of models that {spec.workers} ranks hold", spec.replicas, bound)
    may_join = traits.joiners and not spec.per_worker
    bound = f"0: no worker can join a run {'with per_worker' if spec.per_worker else 'of this method'} later"
    refuse_unless(may_join or not joiners, "the number of joining workers", joiners, bound)
    spec.strategy.check(spec.workers, spec.servers, spec.batch_size, spec.task.build(spec.seed))


def _refuse_evaluations(spec: RunSpec) -> None:
    every = spec.evaluate_every
    if every is None:
        return
    refuse_unless(every >= 1, "evaluate_every", every, ">= 1")
    refuse_unless(has_metric(spec.task), "evaluate_every", every, f"None: {spec.task.name} has no test data or metric")
    refuse_unless(
        not spec.engine.fixes_order, "evaluate_every", every, "None: the cluster prescribes the order of events"
    )


def has_metric(task: Task) -> bool:
    """Whether weights can be evaluated."""
    return task.metric is not None and task.test is not None and not task.sizes_only


def _with_checkpoints(spec: RunSpec, resume: str | Path | None) -> RunSpec:
    """The spec with what it saves and resumes from. A real run with a folder saves when it is stopped."""
    every, source = spec.checkpoint_every, None if resume is None else folder_of(resume)
    may_save = spec.strategy.traits.resumable and not spec.task.sizes_only
    if spec.out is not None and (every is not None or (spec.engine.world == "real" and may_save)):
        folder = spec.out / CHECKPOINTS
        refuse_to_mix(folder, source)
        spec = replace(spec, checkpoints=folder)
    if every is None and source is None:
        return spec
    name, value = ("resume", resume) if every is None else ("checkpoint_every", every)
    refuse_unless(spec.strategy.traits.resumable, name, value, "None: this method cannot be saved")
    refuse_unless(not spec.task.sizes_only, name, value, "None: a task of sizes only has nothing to save")
    refuse_unless(not spec.engine.fixes_order, name, value, "None: the cluster prescribes the order of events")
    refuse_unless(every is None or every >= 1, "checkpoint_every", every, ">= 1")
    if every is not None and spec.out is None:
        raise Refused(f"checkpoint_every is {every}, but there is no folder `out` to save in")
    return spec if source is None else replace(spec, resume=resumed(source, spec))
