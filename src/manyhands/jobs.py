"""mh.train: run one method on one task, and say how it went."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from manyhands.core.budget import Budget, Each, segments
from manyhands.core.errors import PeerLost
from manyhands.core.lines import decoded, encoded
from manyhands.core.loop import Job, Outcome, run_rank
from manyhands.core.protocols import Strategy
from manyhands.core.recipe import recipe_of
from manyhands.core.task import Task
from manyhands.plan import Plan, machines, make_plan, with_checkpoints, with_evaluations
from manyhands.processes import Done, Named, run_plan
from manyhands.report.adapters import adapters as listeners
from manyhands.report.machine import provenance
from manyhands.report.progress import Progress
from manyhands.report.record import FORMAT, Record
from manyhands.result import Result, evaluate, final_loss, lag_of, sha256
from manyhands.runtime.resuming import saver
from manyhands.virtual.budget import Common, Prescribed
from manyhands.virtual.cluster import Cluster
from manyhands.virtual.world import simulate

log = logging.getLogger("manyhands")


def train(
    task: Task | str,
    strategy: Strategy,
    *,
    workers: int | None = None,
    servers: int | None = None,
    cluster: Cluster | None = None,
    link: str = "shm",
    bind: str = "127.0.0.1",
    seed: int = 0,
    steps: int | None = None,
    epochs: float | None = None,
    batch_size: int | None = None,
    per_worker: bool = False,
    data: str | Path | None = None,
    out: str | Path | None = None,
    progress: Progress | None = None,
    checkpoint_every: int | None = None,
    resume: str | Path | None = None,
    spares: int = 0,
    evaluate_every: int | None = None,
    adapters: Sequence[str] = (),
) -> Result:
    """Train a task with a method, by real processes of this machine or in a virtual cluster.

    Args:
        task: a Task, or the name of one of ours.
        strategy: the method, such as `mh.ssp(staleness=3)`.
        workers: how many processes train; without them, and without a cluster, 4 virtual workers do.
        servers: server ranks, if the cluster does not say.
        cluster: virtual machines to train in, in virtual time.
        link: how real workers exchange tensors: "shm" (memory of this machine) or "tcp".
        bind: the address that real workers listen on, if they talk over tcp.
        seed: everything random depends on it.
        steps: updates of size replicas x batch_size.
        epochs: passes over the data, instead of steps.
        batch_size: samples per mini-batch of one worker.
        per_worker: every worker takes `steps` mini-batches, however fast it is.
        data: the folder or file that a task of ours reads, if it reads any.
        out: a folder for the record and the checkpoints.
        progress: told about every step.
        checkpoint_every: steps between two checkpoints; there is one more at the end.
        resume: a checkpoint, a folder of them, or the `out` of the run to go on with.
        spares: real workers that come later: one when a worker is lost, or when this process gets SIGUSR1.
        evaluate_every: steps between two looks at the test data on the way; everyone pauses meanwhile.
        adapters: who is told the record too, if installed: "tensorboard", "mlflow".
    """
    named = Named(task, None if data is None else Path(data)) if isinstance(task, str) else None
    task = named.load() if named is not None else task
    assert isinstance(task, Task)
    where = machines(strategy, cluster, workers, servers, link, bind, spares)
    plan = make_plan(task, strategy, where, seed, steps, epochs, batch_size, per_worker)
    plan = with_evaluations(with_checkpoints(plan, out, checkpoint_every, resume), evaluate_every)
    for remark in plan.remarks:
        log.warning("%s", remark)
    began = time.perf_counter()
    folder = None if out is None else Path(out)
    with Record(folder, goes_on=resume is not None, also=listeners(adapters, folder)) as record:
        record.write(_header(plan))
        try:
            result = _result(plan, _run(plan, named, record, progress), record, began)
        except BaseException as error:
            record.write(_epitaph(error))
            raise
        record.write(_footer(result))
    return result


@dataclass(frozen=True)
class Ran:
    """What came of a plan, in either world."""

    outcomes: list[Outcome]
    bytes_sent: int
    lost: list[tuple[int, str]]
    stopped_at: int | None = None


def _run(plan: Plan, named: Named | None, record: Record, progress: Progress | None) -> Ran:
    def on_lines(parcel: bytes) -> None:
        record.add(parcel)
        if progress is not None:
            for line in decoded(parcel):
                progress.step({**line, "samples": line.get("samples", 0) * plan.replicas / plan.machines.workers})

    if progress is not None:
        progress.start(plan.samples, plan.task.name)
    try:
        return _really(plan, named, on_lines) if plan.machines.cluster is None else _virtually(plan, on_lines)
    finally:
        if progress is not None:
            progress.stop()


def _really(plan: Plan, named: Named | None, on_lines: Callable[[bytes], None]) -> Ran:
    launched = run_plan(plan, named, on_lines)
    done = [one for one in launched.results if isinstance(one, Done)]
    stopped = [one.stopped_at for one in done if one.stopped_at is not None]
    workers = plan.machines.roles.count("worker")
    outcomes = [one.outcome for one in launched.results[:workers] if isinstance(one, Done)]
    return Ran(outcomes, sum(one.bytes_sent for one in done), launched.lost, _last_step(plan, stopped))


def _last_step(plan: Plan, stopped: list[int]) -> int | None:
    """Where a run was stopped, counted in steps of all workers together, as checkpoints count."""
    if not stopped:
        return None
    return max(stopped) if plan.strategy.lockstep else sum(stopped) // plan.machines.workers


def _virtually(plan: Plan, on_lines: Callable[[bytes], None]) -> Ran:
    cluster = plan.machines.cluster
    assert cluster is not None

    def budget(steps: int) -> Budget:
        if plan.machines.prescribed:
            return Prescribed(cluster)
        return Each(steps) if plan.lockstep else Common(steps * plan.replicas)

    job = Job(
        plan.task,
        plan.strategy,
        segments(plan.start, plan.steps, plan.checkpoint_every, budget, plan.evaluate_every),
        plan.batches,
        lambda line: on_lines(encoded(line)),
        plan.seed,
        plan.steps,
        plan.batch_size,
        save=None if plan.checkpoints is None else saver(plan.checkpoints, plan.terms),
        resume=plan.resume,
        evaluate=None if plan.evaluate_every is None else plan.evaluate,
    )
    simulation = simulate(cluster, lambda transport: run_rank(job, transport), plan.seed)
    workers = cluster.size - cluster.servers
    outcomes = [one for one in simulation.results[:workers] if isinstance(one, Outcome)]
    return Ran(outcomes, sum(simulation.bytes), simulation.lost)


def _header(plan: Plan) -> dict[str, Any]:
    where = plan.machines
    hosts = where.placement()
    return {
        "format": FORMAT,
        "task": plan.task.name,
        "method": str(recipe_of(plan.strategy)),
        "strategy": repr(plan.strategy),
        "bounded": plan.lockstep or bounds_clocks(plan.strategy),
        "world": where.world,
        "link": where.link if where.cluster is None else None,
        "cluster": None if where.cluster is None else asdict(where.cluster),
        "workers": where.workers,
        "servers": where.servers,
        "replicas": plan.replicas,
        "seed": plan.seed,
        "start": plan.start,
        "steps": plan.steps,
        "batch_size": plan.batch_size,
        "evaluate_every": plan.evaluate_every,
        "remarks": plan.remarks,
        "participants": [{"role": role, "rank": rank, "host": hosts[rank]} for rank, role in enumerate(where.roles)],
        "made": provenance(),
    }


def bounds_clocks(strategy: Strategy) -> bool:
    """Whether workers wait for the slowest one, sooner or later."""
    when = getattr(strategy, "when", None)
    return bool(getattr(when, "bounds_clocks", False))


def _result(plan: Plan, ran: Ran, record: Record, began: float) -> Result:
    steps = sorted((line for line in record.lines if "loss" in line), key=lambda line: float(line["time"]))
    lead = next((one for one in ran.outcomes if one.weights is not None), None)
    if lead is None:
        raise PeerLost(*(ran.lost or [(0, "it gave no answer")])[-1])
    weights = None if plan.task.sizes_only else lead.weights
    waited = {line["rank"]: float(line["waited"]) for line in steps}
    return Result(
        task=plan.task.name,
        world=plan.machines.world,
        workers=plan.machines.workers,
        servers=plan.machines.servers,
        steps=plan.steps,
        seed=plan.seed,
        seconds=max(one.seconds for one in ran.outcomes),
        wall_seconds=time.perf_counter() - began,
        samples=_samples(plan, steps),
        final_loss=final_loss(steps),
        test_accuracy=None if weights is None else evaluate(plan.task, weights, lead.buffers, plan.seed),
        bytes_sent=ran.bytes_sent,
        lag=lag_of(steps),
        waited_seconds=sum(waited.values()),
        weights=weights,
        buffers=lead.buffers,
        weights_sha256=None if weights is None else sha256(weights),
        records=record.lines,
        record=record.path,
        lost=ran.lost,
        stopped_at=ran.stopped_at,
    )


def _samples(plan: Plan, steps: list[dict[str, Any]]) -> int:
    """Samples consumed: the ranks of one replica consume the same ones."""
    total: int = sum(line["samples"] for line in steps)
    return total * plan.replicas // plan.machines.workers


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


def _epitaph(error: BaseException) -> dict[str, Any]:
    """The last line of a run that gave no result."""
    kind = type(error).__name__
    why = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error) or kind
    lost = [[error.rank, error.why]] if isinstance(error, PeerLost) else []
    return {"end": True, "error": why, "kind": kind, "lost": lost}
