"""mh.compare: several methods on one task, side by side, ranked by how soon they reach a target.

    for every method        with --tune: three learning rates, a short run each; the best one is kept
      for every seed        train, looking at the test data on the way      -> OUT/METHOD/seed-N/record.jsonl
    rank, report            of the records alone                            -> OUT/report.html

A method that fails stays in the table, with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from manyhands import tasks
from manyhands.core.errors import ManyhandsError, Refused, refuse_unless
from manyhands.core.protocols import Strategy
from manyhands.core.recipe import recipe_of, spelled
from manyhands.core.task import Task
from manyhands.jobs import train
from manyhands.plan import machines, make_plan
from manyhands.report.measures import Target, parse_target
from manyhands.report.progress import Progress
from manyhands.report.ranking import Row, ranking
from manyhands.report.reading import Run, read
from manyhands.report.record import NAME, claim
from manyhands.tuning import tuned
from manyhands.virtual.cluster import Cluster

EVALUATIONS = 20
"""Looks at the test data on the way, if nobody says how many."""


class Watch(Protocol):
    """Somebody who is told how far a comparison is."""

    def run(self, method: str, seed: int, words: str) -> Progress:
        """A run begins; its steps are told to what is returned."""

    def done(self, run: Run) -> None:
        """It is over."""


@dataclass(frozen=True)
class Comparison:
    """What came of it: a row for each method, the best first, and all runs."""

    task: str
    target: Target | None
    rows: list[Row]
    runs: list[Run]
    notes: list[str] = field(default_factory=list)
    out: Path | None = None
    report: Path | None = None


@dataclass(frozen=True)
class Setting:
    """What all runs of a comparison have in common."""

    task: Task | str
    common: Mapping[str, Any]
    """Arguments of `train`."""
    length: Mapping[str, Any]
    """Steps or epochs, batch size."""
    evaluations: int
    loaded: Task

    def arguments(self, strategy: Strategy, seed: int, share: float = 1.0) -> dict[str, Any]:
        """Those of one run, which may be a part of the whole length; refused if the method cannot work so."""
        place: dict[str, Any] = {"cluster": None, "workers": None, "servers": None, "link": "shm", "bind": "127.0.0.1"}
        where = machines(strategy, **{name: self.common.get(name, usual) for name, usual in place.items()})
        sizes = {name: self.length.get(name) for name in ("steps", "epochs", "batch_size")}
        plan = make_plan(self.loaded, strategy, where, seed, **sizes, per_worker=False)
        steps = max(1, round(share * plan.steps))
        every = max(1, steps // self.evaluations) if has_metric(self.loaded) else None
        length = {"steps": steps, "batch_size": plan.batch_size, "evaluate_every": every}
        return {**self.common, **length, "seed": seed}


def compare(
    task: Task | str,
    strategies: Sequence[Strategy] | Mapping[str, Strategy],
    *,
    workers: int | None = None,
    servers: int | None = None,
    cluster: Cluster | None = None,
    link: str = "shm",
    bind: str = "127.0.0.1",
    steps: int | None = None,
    epochs: float | None = None,
    batch_size: int | None = None,
    target: Target | str | None = None,
    seeds: int | Sequence[int] = 1,
    tune: bool = False,
    evaluations: int = EVALUATIONS,
    data: str | Path | None = None,
    out: str | Path | None = None,
    force: bool = False,
    png: bool = False,
    watch: Watch | None = None,
) -> Comparison:
    """Run methods side by side on one task, and rank them.

    Args:
        task: a Task, or the name of one of ours.
        strategies: the methods, such as `[mh.bsp(), mh.ssp(staleness=3)]`; a mapping gives them names.
        workers, servers, cluster, link, bind, steps, epochs, batch_size, data: as in `mh.train`, for every method.
        target: what is to be reached, such as "accuracy=0.95" or "loss=0.1": methods are ranked by the time it takes.
        seeds: how many repetitions, or which seeds; the table shows medians and spread.
        tune: choose every method's learning rate first, each with the same small budget.
        evaluations: how often to look at the test data on the way; that is how finely a time to target is known.
        out: a folder for records and report; without it only the result is returned.
        force: write into a folder that is not empty.
        png: also write the main figures as pictures.
        watch: told about every run.
    """
    refuse_unless(evaluations >= 1, "evaluations", evaluations, ">= 1")
    chosen = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    refuse_unless(len(chosen) >= 1, "seeds", seeds, ">= 1")
    goal = parse_target(target) if isinstance(target, str) else target
    entries = named(strategies)
    common: dict[str, Any] = {"workers": workers, "servers": servers, "cluster": cluster, "link": link, "bind": bind}
    common["data"] = data
    length = {"steps": steps, "epochs": epochs, "batch_size": batch_size}
    loaded = tasks.load(task, None if data is None else Path(data)) if isinstance(task, str) else task
    if goal is not None and goal.what == "accuracy" and not has_metric(loaded):
        raise Refused(f"the target is {goal}, but must be a loss: {loaded.name} has nothing to be tested on")
    setting = Setting(task, {k: v for k, v in common.items() if v is not None}, length, evaluations, loaded)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory())) if out is None else claim(Path(out), force)
        bench = Bench(setting, folder, watch)
        notes = []
        if tune:
            entries, said = tuned(entries, lambda strategy, *how: bench.run(strategy, chosen[0], *how))
            notes.append(said)
        runs = [bench.run(strategy, seed) for strategy in entries for seed in chosen]
        result = Comparison(loaded.name, goal, ranking(runs, goal), runs, notes)
        return result if out is None else _report(result, folder, png)


def has_metric(task: Task) -> bool:
    """Whether weights can be tested."""
    return task.metric is not None and task.test is not None and not task.sizes_only


def named(strategies: Sequence[Strategy] | Mapping[str, Strategy]) -> list[Strategy]:
    """The strategies, each with a name of its own."""
    if isinstance(strategies, Mapping):
        strategies = [spelled(strategy, name) for name, strategy in strategies.items()]
    refuse_unless(len(strategies) >= 1, "the number of methods", len(strategies), ">= 1")
    names = [str(recipe_of(strategy)) for strategy in strategies]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise Refused(f"{twice} is there twice, but each method must have a name of its own: pass a mapping")
    return list(strategies)


def _report(found: Comparison, folder: Path, png: bool) -> Comparison:
    from manyhands.report.page import write_report

    title = f"{len(found.rows)} methods on {found.task}"
    page = write_report(found.runs, folder, target=found.target, title=title, notes=found.notes, png=png)
    return replace(found, out=folder, report=page)


@dataclass
class Bench:
    """Runs one method after the other."""

    setting: Setting
    folder: Path
    watch: Watch | None

    def run(self, strategy: Strategy, seed: int, share: float = 1.0, words: str = "") -> Run:
        """One run, as its record tells it; a run that failed says why."""
        name = str(recipe_of(strategy))
        place = self.folder / re.sub(r"[^\w.=-]+", "-", name).strip("-") / (words or f"seed-{seed}")
        progress = None if self.watch is None else self.watch.run(name, seed, words)
        try:
            arguments = self.setting.arguments(strategy, seed, share)
            train(self.setting.task, strategy, out=place, progress=progress, **arguments)
        except ManyhandsError as error:
            if not (place / NAME).exists():
                return self._told(_stillborn(self.setting, name, seed, error))
        return self._told(read(place))

    def _told(self, run: Run) -> Run:
        if self.watch is not None:
            self.watch.done(run)
        return run


def _stillborn(setting: Setting, method: str, seed: int, error: Exception) -> Run:
    """A run that was refused before it began."""
    header = {"method": method, "task": setting.loaded.name, "seed": seed, "workers": 1, "replicas": 1}
    return Run(header, end={"end": True, "error": str(error), "kind": type(error).__name__, "lost": []})
