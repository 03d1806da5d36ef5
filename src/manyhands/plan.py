"""Plan: a run with every default filled in and everything checked, before anything is started."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from manyhands.core.errors import Refused, refuse_unless
from manyhands.core.protocols import (
    Batch,
    Checks,
    Divides,
    Draws,
    Remarks,
    Saves,
    Serves,
    Strategy,
    Transport,
    Weights,
    Welcomes,
)
from manyhands.core.saving import Snapshot
from manyhands.core.task import Task
from manyhands.result import evaluate
from manyhands.runtime.resuming import CHECKPOINTS, Terms, folder_of, refuse_to_mix, resumed
from manyhands.runtime.seat import LINKS
from manyhands.splits.data import Share
from manyhands.virtual.cluster import Cluster


@dataclass(frozen=True)
class Machines:
    """Where a run takes place: in a virtual cluster, or in processes of this machine that talk over a link.

    Args:
        workers: those that begin together.
        servers: ranks that only serve.
        cluster: the virtual machines, if they are virtual.
        link: of real processes.
        bind: the address they listen on.
        newcomers: how many more workers may come.
    """

    workers: int
    servers: int = 0
    cluster: Cluster | None = None
    link: str = "shm"
    bind: str = "127.0.0.1"
    newcomers: int = 0

    @property
    def world(self) -> str:
        return "real" if self.cluster is None else "virtual"

    @property
    def prescribed(self) -> bool:
        """Whether the order of events is given."""
        return self.cluster is not None and (self.cluster.order is not None or self.cluster.turns is not None)

    def placement(self) -> list[int]:
        """The host of every rank."""
        if self.cluster is not None:
            return list(self.cluster.placement())
        size = len(self.roles)
        return list(range(size)) if self.link == "tcp" else [0] * size

    @property
    def roles(self) -> list[str]:
        """The role of every rank, whether it comes or not."""
        return ["worker"] * (self.workers + self.newcomers) + ["server"] * self.servers


@dataclass(frozen=True)
class Plan:
    """What is to be done, where, and for how long."""

    task: Task
    strategy: Strategy
    machines: Machines
    seed: int
    steps: int
    batch_size: int
    per_worker: bool
    checkpoint_every: int | None = None
    evaluate_every: int | None = None
    checkpoints: Path | None = None
    resume: Snapshot | None = None

    @property
    def replicas(self) -> int:
        """How many copies of the model there are."""
        return _replicas(self.strategy, self.machines.workers)

    @property
    def lockstep(self) -> bool:
        """Whether every worker takes the same number of mini-batches."""
        return self.strategy.lockstep or self.per_worker

    @property
    def samples(self) -> int:
        """The budget."""
        return (self.steps - self.start) * self.replicas * self.batch_size

    @property
    def start(self) -> int:
        """The step the run begins at: 0, or where a checkpoint was."""
        return 0 if self.resume is None else self.resume.step

    @property
    def remarks(self) -> list[str]:
        """Where the method does not do quite what its knobs say."""
        return [*self.strategy.remarks(self.steps)] if isinstance(self.strategy, Remarks) else []

    def evaluate(self, weights: Weights, buffers: Weights) -> float | None:
        """The task's metric on its test data."""
        return evaluate(self.task, weights, buffers, self.seed)

    @property
    def terms(self) -> Terms:
        """What checkpoints say about the run."""
        workers, servers = self.machines.workers, self.machines.servers
        return Terms(self.task.name, self.strategy, self.seed, self.batch_size, workers, servers, self.replicas)

    def batches(self, transport: Transport, position: int) -> Iterator[Batch]:
        """This rank's mini-batches from a position on; all ranks of one replica see the same."""
        if self.task.sizes_only:
            while True:
                yield ()
        if transport.rank in transport.late:  # all is shared out already, so it sees everything
            replica, replicas, whole = transport.rank, transport.roles.count("worker"), True
        else:
            replica, replicas = self.terms.replica(transport.rank), self.replicas
            whole = isinstance(self.strategy, Draws) and self.strategy.draws_from_all
        share = Share(self.task.data, replica, replicas, self.batch_size, self.seed, whole=whole)
        share.position = position
        while True:
            yield share.next_batch()


def machines(
    strategy: Strategy,
    cluster: Cluster | None,
    workers: int | None,
    servers: int | None,
    link: str,
    bind: str,
    spares: int = 0,
) -> Machines:
    """Where a run takes place; refused if the method cannot work there."""
    if cluster is None and workers is not None:
        refuse_unless(workers >= 1, "workers", workers, ">= 1")
        refuse_unless((servers or 0) >= 0, "servers", servers, ">= 0")
        refuse_unless(link in LINKS, "link", link, " or ".join(LINKS))
        fits = link == "shm" or not strategy.one_host
        refuse_unless(fits, "link", link, "shm: the workers of this method share memory, and with tcp each is a host")
        refuse_unless(spares >= 0, "spares", spares, ">= 0")
        return Machines(workers, servers or 0, None, link, bind, spares)
    refuse_unless(not spares, "spares", spares, "0 in a virtual cluster: it says itself when newcomers come")
    cluster = cluster or Cluster()
    if workers is not None and workers != cluster.workers:
        raise Refused(f"workers is {workers}, but the cluster has {cluster.workers}")
    if servers is not None and cluster.servers not in (0, servers):
        raise Refused(f"servers is {servers}, but the cluster has {cluster.servers}")
    cluster = replace(cluster, servers=cluster.servers if servers is None else servers)
    if strategy.one_host:
        cluster = cluster.on_one_host()
    return Machines(cluster.workers, cluster.servers, cluster, newcomers=len(cluster.newcomers))


def make_plan(
    task: Task,
    strategy: Strategy,
    where: Machines,
    seed: int,
    steps: int | None,
    epochs: float | None,
    batch_size: int | None,
    per_worker: bool,
) -> Plan:
    """Fill in what was not said, and refuse what cannot work."""
    if steps is not None and epochs is not None:
        raise Refused(f"steps is {steps} and epochs is {epochs}, but only one of them can be given")
    batch_size = task.batch_size if batch_size is None else batch_size
    refuse_unless(batch_size >= 1, "batch_size", batch_size, ">= 1")
    replicas = _replicas(strategy, where.workers)
    refuse_unless(
        len(task.data) >= replicas, "the number of samples", len(task.data), f">= {replicas}, the number of workers"
    )
    virtual = where.cluster is not None or not task.sizes_only
    refuse_unless(virtual, "the task", task.name, "one with data: sizes only are for virtual time")
    has_servers = isinstance(strategy, Serves) or not where.servers
    refuse_unless(has_servers, "servers", where.servers, "0: this method has none")
    welcome = isinstance(strategy, Welcomes) and strategy.welcomes and not per_worker
    refuse_unless(
        welcome or not where.newcomers, "the number of newcomers", where.newcomers, "0: here nobody may come later"
    )
    if isinstance(strategy, Checks):
        strategy.check(where.workers, where.servers, batch_size, task.build(seed))
    if steps is None:
        epochs = task.epochs if epochs is None else epochs
        refuse_unless(0 < epochs < math.inf, "epochs", epochs, "> 0 and finite")
        steps = max(1, math.floor(epochs * len(task.data) / (replicas * batch_size)))
    refuse_unless(steps >= 1, "steps", steps, ">= 1")
    return Plan(task, strategy, where, seed, steps, batch_size, per_worker)


def with_evaluations(plan: Plan, every: int | None) -> Plan:
    """The plan with what it is to look at on the way, checked."""
    if every is None:
        return plan
    refuse_unless(every >= 1, "evaluate_every", every, ">= 1")
    has_metric = plan.task.metric is not None and plan.task.test is not None and not plan.task.sizes_only
    refuse_unless(has_metric, "evaluate_every", every, f"None: {plan.task.name} has nothing to be tested on")
    refuse_unless(
        not plan.machines.prescribed, "evaluate_every", every, "None: the cluster prescribes the order of events"
    )
    return replace(plan, evaluate_every=every)


def with_checkpoints(plan: Plan, out: str | Path | None, every: int | None, resume: str | Path | None) -> Plan:
    """The plan with what it is to save and to go on from, all checked. A real run with a folder saves when stopped."""
    source = None if resume is None else folder_of(resume)
    may_save = isinstance(plan.strategy, Saves) and not plan.task.sizes_only
    if out is not None and (every is not None or (plan.machines.cluster is None and may_save)):
        plan = replace(plan, checkpoint_every=every, checkpoints=Path(out) / CHECKPOINTS)
        refuse_to_mix(Path(out) / CHECKPOINTS, source)
    if every is None and resume is None:
        return plan
    name, value = ("resume", resume) if every is None else ("checkpoint_every", every)
    refuse_unless(isinstance(plan.strategy, Saves), name, value, "None: this method cannot be saved")
    refuse_unless(not plan.task.sizes_only, name, value, "None: a task of sizes only has nothing to save")
    refuse_unless(not plan.machines.prescribed, name, value, "None: the cluster prescribes the order of events")
    refuse_unless(every is None or every >= 1, "checkpoint_every", every, ">= 1")
    if every is not None and out is None:
        raise Refused(f"checkpoint_every is {every}, but there is no folder `out` to save in")
    return plan if source is None else replace(plan, resume=resumed(source, plan.terms, plan.steps))


def _replicas(strategy: Strategy, workers: int) -> int:
    return strategy.replicas(workers) if isinstance(strategy, Divides) else workers
