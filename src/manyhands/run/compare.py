"""mh.compare: several methods on one task, side by side, ranked by how soon they reach a target.

    for every method        with tune=True: three learning rates, a short run each; the best one is kept
      for every seed        train, with evaluations on the test data      -> OUT/METHOD/seed-N/record.jsonl
    rank, report            from the records alone                        -> OUT/report.html

A method that fails stays in the table, with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Protocol

from manyhands import tasks
from manyhands.core.errors import ManyhandsError, Refused, refuse_unless
from manyhands.core.recipe import recipe_of, spelled
from manyhands.core.strategy import Strategy
from manyhands.core.task import Task
from manyhands.core.team import Team
from manyhands.engines.choose import On, choose_engine
from manyhands.engines.engine import Engine
from manyhands.report.live import choose as live
from manyhands.report.measures import Target, parse_target
from manyhands.report.progress import Progress
from manyhands.report.ranking import Row, ranking
from manyhands.report.reading import RecordedRun, read
from manyhands.report.record import NAME, claim
from manyhands.run.methods import over_team
from manyhands.run.spec import RunSpec, has_metric, make_spec, run_length
from manyhands.run.train import run_spec
from manyhands.run.tune import tuned
from manyhands.virtual.cluster import Cluster

if TYPE_CHECKING:
    from pandas import DataFrame
    from plotly.graph_objects import Figure

EVALUATIONS = 20
"""How often each run is evaluated on the test data by default."""


class Watch(Protocol):
    """Shows how far a comparison is."""

    def run(self, method: str, seed: int, words: str) -> Progress:
        """A run begins; the lines of its record are passed to what is returned. `words` say what a trial is for."""

    def done(self, run: RecordedRun) -> None:
        """A run has ended."""


@dataclass(frozen=True, repr=False)
class Comparison:
    """The result of a comparison: a row for each method, the best first, and all runs."""

    task: str
    target: Target | None
    rows: list[Row]
    runs: list[RecordedRun]
    notes: list[str] = field(default_factory=list)
    out: Path | None = None
    report: Path | None = None

    def __repr__(self) -> str:
        from manyhands.run.display import comparison_text

        return comparison_text(self)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from manyhands.run.display import comparison_html

        return comparison_html(self)

    def to_pandas(self, of: str = "methods") -> DataFrame:
        """The ranking, a row for each of the "methods" with medians over its seeds, or the totals of all "runs"."""
        from manyhands.run.display import comparison_frame

        return comparison_frame(self, of)

    def plot(self, over: str = "seconds") -> Figure:
        """Loss and accuracy of all runs, over "seconds", "samples" or "bytes", as a figure of plotly."""
        from manyhands.run.display import curves_figure

        return curves_figure(self.runs, over, self.target)


@dataclass(frozen=True)
class Setting:
    """What all runs of a comparison have in common; the fields are arguments of `mh.compare`."""

    task: Task | str
    loaded: Task
    engine: Engine
    data: str | Path | None
    steps: int | None
    epochs: float | None
    batch_size: int | None
    evaluations: int

    def spec(self, strategy: Strategy, seed: int, out: Path, share: float) -> RunSpec:
        """The spec of one run, which may be a share of the whole length; refused if the method cannot work so."""
        replicas = strategy.replicas(self.engine.roles["worker"])
        whole, batch_size = run_length(self.loaded, replicas, self.steps, self.epochs, self.batch_size)
        steps = max(1, round(share * whole))
        spec = make_spec(
            self.task,
            strategy,
            self.engine,
            data=self.data,
            seed=seed,
            steps=steps,
            batch_size=batch_size,
            out=out,
            evaluate_every=max(1, steps // self.evaluations) if has_metric(self.loaded) else None,
        )
        return replace(spec, checkpoints=None)  # a comparison is not resumed, so an interrupt ends it at once


def compare(
    task: Task | str,
    strategies: Sequence[Strategy] | Mapping[str, Strategy],
    *,
    on: On | None = None,
    team: Team | str | None = None,
    workers: int | None = None,
    servers: int | None = None,
    cluster: Cluster | None = None,
    link: str | None = None,
    bind: str | None = None,
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
    progress: bool = False,
) -> Comparison:
    """Run methods side by side on one task, and rank them.

    Args:
        task: a Task, or the name of a built-in one.
        strategies: the methods, such as `[mh.bsp(), mh.ssp(staleness=3)]`; a mapping gives them names.
        on, team, workers, servers, cluster, link, bind, steps, epochs, batch_size, data: as in `mh.train`, for every
            method.
        target: what is to be reached, such as "accuracy=0.95" or "loss=0.1": methods are ranked by the time it takes.
        seeds: how many repetitions, or which seeds; the table shows medians and spread.
        tune: choose every method's learning rate first, each with the same small budget.
        evaluations: how often each run is evaluated on the test data; the time to a target is known to that precision.
        out: a folder for records and report; without it only the result is returned.
        force: write into a folder that is not empty.
        png: also write the main figures as PNG files.
        watch: called when a run begins and ends, and for every line of its record.
        progress: show the table that `manyhands compare` shows while the methods run.
    """
    refuse_unless(evaluations >= 1, "evaluations", evaluations, ">= 1")
    chosen = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    refuse_unless(len(chosen) >= 1, "seeds", seeds, ">= 1")
    goal = parse_target(target) if isinstance(target, str) else target
    entries = [over_team(strategy, team) for strategy in named(strategies)]
    refuse_unless(watch is None or not progress, "progress", progress, "False if watch is given")
    engine = choose_engine(on, workers=workers, servers=servers, cluster=cluster, link=link, bind=bind)
    loaded = tasks.load(task, None if data is None else Path(data)) if isinstance(task, str) else task
    if goal is not None and goal.what == "accuracy" and not has_metric(loaded):
        raise Refused(f"the target is {goal}, but must be a loss: {loaded.name} has no test data or metric")
    setting = Setting(task, loaded, engine, data, steps, epochs, batch_size, evaluations)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory())) if out is None else claim(Path(out), force)
        if progress:
            watch = stack.enter_context(live([str(recipe_of(one)) for one in entries], len(chosen), goal))
        bench = Bench(setting, folder, watch)
        notes = []
        if tune:
            entries, note = tuned(entries, lambda strategy, *how: bench.run(strategy, chosen[0], *how))
            notes.append(note)
        runs = [bench.run(strategy, seed) for strategy in entries for seed in chosen]
        result = Comparison(loaded.name, goal, ranking(runs, goal), runs, notes)
        return result if out is None else with_report(result, folder, png)


def named(strategies: Sequence[Strategy] | Mapping[str, Strategy]) -> list[Strategy]:
    """The strategies as a list; refused if two have the same name."""
    if isinstance(strategies, Mapping):
        strategies = [spelled(strategy, name) for name, strategy in strategies.items()]
    refuse_unless(len(strategies) >= 1, "the number of methods", len(strategies), ">= 1")
    names = [str(recipe_of(strategy)) for strategy in strategies]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise Refused(f"{twice} is there twice, but each method must have its own name: pass a mapping")
    return list(strategies)


def with_report(found: Comparison, folder: Path, png: bool) -> Comparison:
    """Write the report of a comparison into its folder."""
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

    def run(self, strategy: Strategy, seed: int, share: float = 1.0, words: str = "") -> RecordedRun:
        """One run, read from its record; a run that failed says why."""
        name = str(recipe_of(strategy))
        out = run_folder(self.folder, name, words or f"seed-{seed}")
        progress = None if self.watch is None else self.watch.run(name, seed, words)
        try:
            run_spec(self.setting.spec(strategy, seed, out, share), progress)
            run = read(out)
        except ManyhandsError as error:
            run = read(out) if (out / NAME).exists() else refused_run(self.setting.loaded.name, name, seed, error)
        if self.watch is not None:
            self.watch.done(run)
        return run


def run_folder(folder: Path, method: str, name: str) -> Path:
    """The folder of one run of a method, below that of the comparison."""
    return folder / re.sub(r"[^\w.=-]+", "-", method).strip("-") / name


def refused_run(task: str, method: str, seed: int, error: BaseException) -> RecordedRun:
    """A run that was refused before it began, so that it has no record."""
    ranks = [{"role": "worker", "rank": 0, "host": 0}]
    header = {"method": method, "task": task, "seed": seed, "workers": 1, "replicas": 1, "participants": ranks}
    kind = type(error).__name__
    return RecordedRun(header, end={"kind": "end", "end": True, "error": str(error), "error_kind": kind, "lost": []})
