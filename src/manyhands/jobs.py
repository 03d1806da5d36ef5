"""mh.train: run one method on one task, and say how it went."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from manyhands import tasks
from manyhands.core.budget import Budget, Each
from manyhands.core.errors import PeerLost, Refused, refuse_unless
from manyhands.core.loop import Job, Outcome, run_rank
from manyhands.core.protocols import Batch, Checks, Divides, Serves, Strategy, Transport
from manyhands.core.task import Task
from manyhands.report.progress import Progress
from manyhands.report.record import Record
from manyhands.result import Result, evaluate, final_loss, lag_of, sha256
from manyhands.splits.data import Share
from manyhands.virtual.budget import Common, Prescribed
from manyhands.virtual.cluster import Cluster
from manyhands.virtual.world import Simulation, simulate


@dataclass(frozen=True)
class Plan:
    """A run with every default filled in and everything checked."""

    task: Task
    strategy: Strategy
    cluster: Cluster
    seed: int
    steps: int
    batch_size: int
    per_worker: bool

    @property
    def replicas(self) -> int:
        """How many copies of the model there are."""
        return _replicas(self.strategy, self.cluster.workers)

    @property
    def samples(self) -> int:
        """The budget."""
        return self.steps * self.replicas * self.batch_size

    def budget(self) -> Budget:
        """Who may take how many mini-batches."""
        if self.cluster.order is not None or self.cluster.turns is not None:
            return Prescribed(self.cluster)
        if self.strategy.lockstep or self.per_worker:
            return Each(self.steps)
        return Common(self.steps * self.replicas)

    def batches(self, transport: Transport) -> Iterator[Batch]:
        """This rank's mini-batches; all ranks of one replica see the same."""
        if self.task.sizes_only:
            while True:
                yield ()
        replica = transport.rank * self.replicas // self.cluster.workers
        share = Share(self.task.data, replica, self.replicas, self.batch_size, self.seed)
        while True:
            yield share.next_batch()


def train(
    task: Task | str,
    strategy: Strategy,
    *,
    cluster: Cluster | None = None,
    servers: int | None = None,
    seed: int = 0,
    steps: int | None = None,
    epochs: float | None = None,
    batch_size: int | None = None,
    per_worker: bool = False,
    out: str | Path | None = None,
    progress: Progress | None = None,
) -> Result:
    """Train a task with a method in a virtual cluster.

    Args:
        task: a Task, or the name of one of ours.
        strategy: the method, such as `mh.ssp(staleness=3)`.
        cluster: the machines; by default 4 workers on hosts of their own.
        servers: server ranks, if the cluster does not say.
        seed: everything random depends on it.
        steps: updates of size replicas x batch_size.
        epochs: passes over the data, instead of steps.
        batch_size: samples per mini-batch of one worker.
        per_worker: every worker takes `steps` mini-batches, however fast it is.
        out: a folder for the record.
        progress: told about every step.
    """
    task = tasks.load(task) if isinstance(task, str) else task
    plan = _plan(task, strategy, cluster or Cluster(), servers, seed, steps, epochs, batch_size, per_worker)
    began = time.perf_counter()
    with Record(None if out is None else Path(out)) as record:
        record.write(_header(plan))
        simulation = _run(plan, record, progress)
        result = _result(plan, simulation, record, began)
        record.write(_footer(result))
    return result


def _plan(
    task: Task,
    strategy: Strategy,
    cluster: Cluster,
    servers: int | None,
    seed: int,
    steps: int | None,
    epochs: float | None,
    batch_size: int | None,
    per_worker: bool,
) -> Plan:
    if servers is not None and cluster.servers not in (0, servers):
        raise Refused(f"servers is {servers}, but the cluster has {cluster.servers}")
    cluster = replace(cluster, servers=cluster.servers if servers is None else servers)
    if strategy.one_host:
        cluster = cluster.on_one_host()
    if steps is not None and epochs is not None:
        raise Refused(f"steps is {steps} and epochs is {epochs}, but only one of them can be given")
    batch_size = task.batch_size if batch_size is None else batch_size
    refuse_unless(batch_size >= 1, "batch_size", batch_size, ">= 1")
    replicas = _replicas(strategy, cluster.workers)
    refuse_unless(
        len(task.data) >= replicas, "the number of samples", len(task.data), f">= {replicas}, the number of workers"
    )
    has_servers = isinstance(strategy, Serves) or not cluster.servers
    refuse_unless(has_servers, "servers", cluster.servers, "0: this method has none")
    if isinstance(strategy, Checks):
        strategy.check(cluster.workers, cluster.servers, batch_size, task.build(seed))
    if steps is None:
        epochs = task.epochs if epochs is None else epochs
        refuse_unless(0 < epochs < math.inf, "epochs", epochs, "> 0 and finite")
        steps = max(1, math.floor(epochs * len(task.data) / (replicas * batch_size)))
    refuse_unless(steps >= 1, "steps", steps, ">= 1")
    return Plan(task, strategy, cluster, seed, steps, batch_size, per_worker)


def _replicas(strategy: Strategy, workers: int) -> int:
    return strategy.replicas(workers) if isinstance(strategy, Divides) else workers


def _run(plan: Plan, record: Record, progress: Progress | None) -> Simulation:
    def observe(line: dict[str, Any]) -> None:
        record.write(line)
        if progress is not None:
            progress.step({**line, "samples": line["samples"] * plan.replicas / plan.cluster.workers})

    job = Job(plan.task, plan.strategy, plan.budget(), plan.batches, observe, plan.seed, plan.steps, plan.batch_size)
    if progress is not None:
        progress.start(plan.samples, plan.task.name)
    try:
        return simulate(plan.cluster, lambda transport: run_rank(job, transport), plan.seed)
    finally:
        if progress is not None:
            progress.stop()


def _header(plan: Plan) -> dict[str, Any]:
    hosts = plan.cluster.placement()
    roles = ["worker"] * plan.cluster.workers + ["server"] * plan.cluster.servers
    return {
        "task": plan.task.name,
        "strategy": repr(plan.strategy),
        "world": "virtual",
        "seed": plan.seed,
        "steps": plan.steps,
        "batch_size": plan.batch_size,
        "participants": [{"role": role, "rank": rank, "host": hosts[rank]} for rank, role in enumerate(roles)],
    }


def _result(plan: Plan, simulation: Simulation, record: Record, began: float) -> Result:
    steps = sorted((line for line in record.lines if "loss" in line), key=lambda line: float(line["time"]))
    outcomes = [one for one in simulation.results[: plan.cluster.workers] if isinstance(one, Outcome)]
    lead = next((one for one in outcomes if one.weights is not None), None)
    if lead is None:
        raise PeerLost(*(simulation.lost or [(0, "it gave no answer")])[-1])
    weights = None if plan.task.sizes_only else lead.weights
    waited = {line["rank"]: float(line["waited"]) for line in steps}
    return Result(
        task=plan.task.name,
        world="virtual",
        workers=plan.cluster.workers,
        servers=plan.cluster.servers,
        steps=plan.steps,
        seed=plan.seed,
        seconds=max(one.seconds for one in outcomes),
        wall_seconds=time.perf_counter() - began,
        samples=_samples(plan, steps),
        final_loss=final_loss(steps),
        test_accuracy=None if weights is None else evaluate(plan.task, weights, lead.buffers, plan.seed),
        bytes_sent=sum(simulation.bytes),
        lag=lag_of(steps),
        waited_seconds=sum(waited.values()),
        weights=weights,
        buffers=lead.buffers,
        weights_sha256=None if weights is None else sha256(weights),
        records=record.lines,
        record=record.path,
        lost=simulation.lost,
    )


def _samples(plan: Plan, steps: list[dict[str, Any]]) -> int:
    """Samples consumed: the ranks of one replica consume the same ones."""
    total: int = sum(line["samples"] for line in steps)
    return total * plan.replicas // plan.cluster.workers


def _footer(result: Result) -> dict[str, Any]:
    names = (
        "seconds",
        "wall_seconds",
        "samples",
        "final_loss",
        "test_accuracy",
        "bytes_sent",
        "weights_sha256",
        "lost",
    )
    return {"end": True, **{name: getattr(result, name) for name in names}}
