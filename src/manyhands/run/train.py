"""mh.train: trains one task with one method, and returns how it went."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from manyhands.core.errors import NotWritten, PeerLost, refuse_unless
from manyhands.core.lag import lag_summary
from manyhands.core.recipe import recipe_of
from manyhands.core.record import decoded
from manyhands.core.strategy import Strategy
from manyhands.core.task import Task
from manyhands.core.team import Team
from manyhands.engines.choose import On, choose_engine
from manyhands.engines.engine import Ran
from manyhands.report.adapters import adapters as listeners
from manyhands.report.machine import provenance
from manyhands.report.progress import Progress, choose
from manyhands.report.record import FORMAT, Record
from manyhands.run.methods import over_team
from manyhands.run.result import Interrupted, Result, evaluate, final_loss, sha256
from manyhands.run.spec import RunSpec, make_spec
from manyhands.strategies.pipeline_plan import drawn_schedule
from manyhands.virtual.cluster import Cluster

log = logging.getLogger("manyhands")

UNSAVED = b'"unsaved"'
"""In the encoded lines of checkpoints that could not be written, and hardly in others: decoding all would take time."""


def train(
    task: Task | str,
    strategy: Strategy,
    *,
    on: On | None = None,
    team: Team | str | None = None,
    workers: int | None = None,
    servers: int | None = None,
    cluster: Cluster | None = None,
    link: str | None = None,
    bind: str | None = None,
    seed: int = 0,
    steps: int | None = None,
    epochs: float | None = None,
    batch_size: int | None = None,
    per_worker: bool = False,
    data: str | Path | None = None,
    out: str | Path | None = None,
    progress: Progress | bool | None = None,
    checkpoint_every: int | None = None,
    resume: str | Path | None = None,
    spares: int | None = None,
    evaluate_every: int | None = None,
    adapters: Sequence[str] = (),
) -> Result:
    """Train a task with a method: in real processes of this machine, or in a virtual cluster in virtual time.

        mh.train("digits", mh.ssp(staleness=3), on=mh.Local(workers=4, link="tcp"))
        mh.train("digits", mh.ssp(staleness=3), on=mh.Cluster(workers=64, bandwidth="1Gbit"))

    Without `on`, `workers=4` is short for `on=mh.Local(4)` and `cluster=c` for `on=c`; without either the run takes
    place in `mh.Cluster()`, which has 4 virtual workers.

    Args:
        task: a Task, or the name of a built-in one.
        strategy: the method, such as `mh.ssp(staleness=3)`.
        on: where the run takes place: `mh.Local(...)` or `mh.Cluster(...)`.
        team: how several ranks form one worker, each with a part of the model: `mh.piped(stages=2)`.
        workers: short form: the number of real workers.
        servers: short form: the number of server ranks, real or of the cluster.
        cluster: short form: a virtual cluster.
        link: short form, real processes only: "shm" (shared memory, the default) or "tcp".
        bind: short form, real processes only: the address to listen on with link "tcp", 127.0.0.1 by default.
        seed: everything random depends on it.
        steps: updates of size replicas x batch_size.
        epochs: passes over the data, instead of steps.
        batch_size: samples per mini-batch of one worker.
        per_worker: every worker takes `steps` mini-batches, however fast it is.
        data: the folder or file that a built-in task reads, if it reads any.
        out: a folder for the record and the checkpoints.
        progress: True shows the bar that `manyhands train` shows; or an object that gets every line of the record.
        checkpoint_every: steps between two checkpoints; the last one is made at the end.
        resume: the checkpoint to continue from: its folder, a folder of checkpoints, or the `out` of a run.
        spares: short form, real processes only: workers that join when one is lost, or at SIGUSR1.
        evaluate_every: steps between two evaluations on the test data; workers pause, and reports leave the pause out.
        adapters: where the record is also sent, if installed: "tensorboard", "mlflow".
    """
    engine = choose_engine(on, workers=workers, servers=servers, cluster=cluster, link=link, bind=bind, spares=spares)
    spec = make_spec(
        task,
        over_team(strategy, team),
        engine,
        data=data,
        seed=seed,
        steps=steps,
        epochs=epochs,
        batch_size=batch_size,
        per_worker=per_worker,
        out=out,
        checkpoint_every=checkpoint_every,
        resume=resume,
        evaluate_every=evaluate_every,
    )
    return run_spec(spec, shown(progress, spec), adapters)


def shown(progress: Progress | bool | None, spec: RunSpec) -> Progress | None:
    """What shows the progress of a run; `True` stands for a bar, or for lines where output is no terminal."""
    if progress is True:
        return choose(f"{recipe_of(spec.strategy).name} on {spec.task.name}")
    if not progress:
        return None
    fits = all(callable(getattr(progress, name, None)) for name in ("start", "step", "stop"))
    refuse_unless(fits, "progress", progress, "True, False or an object with start, step and stop")
    return progress


def run_spec(spec: RunSpec, progress: Progress | None = None, adapters: Sequence[str] = ()) -> Result:
    """Carry out a run and record it, its failure included."""
    for remark in spec.remarks:
        log.warning("%s", remark)
    began = time.perf_counter()
    with Record(spec.out, goes_on=spec.resume is not None, also=listeners(adapters, spec.out)) as record:
        record.write(_header(spec))
        try:
            ran = _run(spec, record, progress)
            result = _result(spec, ran, record, began)
            _raise_unsaved(ran)
        except BaseException as error:
            record.write(error_footer(error))
            raise
        record.write(_footer(result))
    result = replace(result, record_error=record.failure)
    if ran.interrupted:
        raise Interrupted(result)
    return result


def _raise_unsaved(ran: Ran) -> None:
    """Fail if the last checkpoint was due and could not be written: what was trained is not where it should be."""
    for outcome in ran.outcomes:
        if outcome.unsaved:
            where = "is complete" if ran.stopped_at is None else f"was stopped at step {ran.stopped_at}"
            raise NotWritten(f"the run {where}, but could not be saved: {outcome.unsaved}")


def _run(spec: RunSpec, record: Record, progress: Progress | None) -> Ran:
    if progress is None:
        return spec.engine.run(spec, partial(_add, record))
    share = spec.replicas / spec.workers  # the ranks of one replica consume the same samples

    def observe(parcel: bytes) -> None:
        _add(record, parcel)
        for line in decoded(parcel):
            progress.step({**line, "samples": line.get("samples", 0) * share})

    progress.start(spec.samples, spec.task.name)
    try:
        return spec.engine.run(spec, observe)
    finally:
        progress.stop()


def _add(record: Record, parcel: bytes) -> None:
    """Add lines to the record, and say at once which checkpoint could not be written."""
    record.add(parcel)
    if UNSAVED in parcel:
        for line in decoded(parcel):
            if line["kind"] == "unsaved":
                log.warning("%s; the run continues, and saves again at the next checkpoint", line["why"])


def _header(spec: RunSpec) -> dict[str, Any]:
    hosts = spec.engine.placement()
    return {
        "kind": "header",
        "format": FORMAT,
        "task": spec.task.name,
        "method": str(recipe_of(spec.strategy)),
        "strategy": repr(spec.strategy),
        "bounded": spec.lockstep or spec.strategy.traits.bounded,
        "lag": spec.strategy.traits.lag,
        "lag_counts": spec.strategy.traits.lag_counts,
        **spec.engine.facts(),
        "workers": spec.workers,
        "servers": spec.servers,
        "replicas": spec.replicas,
        "seed": spec.seed,
        "start": spec.start,
        "steps": spec.steps,
        "batch_size": spec.batch_size,
        "evaluate_every": spec.evaluate_every,
        "remarks": spec.remarks,
        "participants": [
            {"role": role, "rank": rank, "host": hosts[rank]} for rank, role in enumerate(spec.role_of_rank)
        ],
        "made": provenance(),
        **drawn_schedule(spec.strategy, spec.workers, spec.batch_size),
    }


def _result(spec: RunSpec, ran: Ran, record: Record, began: float) -> Result:
    steps = sorted((line for line in record.lines if line["kind"] == "step"), key=lambda line: float(line["time"]))
    lead = next((one for one in ran.outcomes if one.weights is not None), None)
    if lead is None:
        raise PeerLost(*(ran.lost or [(0, "it returned no weights")])[-1])
    weights = None if spec.task.sizes_only else lead.weights
    waited = {line["rank"]: float(line["waited"]) for line in steps}
    return Result(
        task=spec.task.name,
        world=spec.engine.world,
        workers=spec.workers,
        servers=spec.servers,
        steps=spec.steps,
        seed=spec.seed,
        seconds=max(one.seconds for one in ran.outcomes),
        wall_seconds=time.perf_counter() - began,
        samples=_samples(spec, steps),
        final_loss=final_loss([line for line in steps if spec.is_last_of_replica(line["rank"])]),
        test_accuracy=None if weights is None else evaluate(spec.task, weights, lead.buffers, spec.seed),
        bytes_sent=ran.bytes_sent,
        lag=lag_summary(steps),
        waited_seconds=sum(waited.values()),
        weights=weights,
        buffers=lead.buffers,
        weights_sha256=None if weights is None else sha256(weights),
        records=record.lines,
        record=record.path,
        lost=ran.lost,
        stopped_at=ran.stopped_at,
    )


def _samples(spec: RunSpec, steps: list[dict[str, Any]]) -> int:
    """How many samples were consumed; the ranks of one replica consume the same ones."""
    total: int = sum(line["samples"] for line in steps)
    return total * spec.replicas // spec.workers


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
    return {"kind": "end", "end": True, **{name: getattr(result, name) for name in names}}


def error_footer(error: BaseException) -> dict[str, Any]:
    """The last line of the record of a run that failed."""
    kind = type(error).__name__
    why = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error) or kind
    lost = [[error.rank, error.why]] if isinstance(error, PeerLost) else []
    return {"kind": "end", "end": True, "error": why, "error_kind": kind, "lost": lost}
