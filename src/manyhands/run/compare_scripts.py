"""Comparing methods on a script of the user's own: it runs once for each method and seed, and its records are ranked.

    for every method, seed     manyhands run --method METHOD --out OUT/METHOD/seed-N script.py
    rank, report               as of a comparison on a task       -> OUT/report.html

The method replaces the one that the script joins with, and the seed is that of a script which sets none. What ranks
print is in OUT/METHOD/seed-N/rank0.log and so on. A run that fails stays in the table, with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from manyhands.core.errors import refuse_unless
from manyhands.report.measures import Target
from manyhands.report.ranking import ranking
from manyhands.report.reading import RecordedRun, read
from manyhands.report.record import NAME
from manyhands.run.compare import Comparison, Watch, refused_run, run_folder, with_report
from manyhands.run.script_record import run_recorded
from manyhands.runtime.launch.script_settings import ScriptSettings


def compare_scripts(
    script: Path,
    arguments: Sequence[str],
    methods: Sequence[str],
    *,
    out: Path,
    target: Target | None = None,
    seeds: int = 1,
    png: bool = False,
    watch: Watch | None = None,
    workers: int = 2,
    **how: Any,
) -> Comparison:
    """Run a script with each method, and rank them; `how` is passed to `run_script`.

    Args:
        script: a Python file that calls `mh.join`.
        arguments: its own.
        methods: as the command line writes them, such as ssp:staleness=3.
        out: a folder for records, logs and report.
        target: what is to be reached: methods are ranked by the time it takes.
        seeds: how many repetitions.
        png: also write the main figures as PNG files.
        watch: called when a run begins and ends, and for every line of its record.
        workers: how many workers.
    """
    refuse_unless(seeds >= 1, "seeds", seeds, ">= 1")
    runs, notes = [], []
    for method in methods:
        for seed in range(seeds):
            folder = run_folder(out, method, f"seed-{seed}")
            run = _run(script, arguments, method, seed, folder, watch, workers=workers, **how)
            runs.append(run)
            notes += [note for note in notes_on(run, seed, folder) if note not in notes]
    return with_report(Comparison(script.name, target, ranking(runs, target), runs, notes), out, png)


def _run(
    script: Path, arguments: Sequence[str], method: str, seed: int, out: Path, watch: Watch | None, **how: Any
) -> RecordedRun:
    """One run, read from its record; one without a record says why."""
    progress = None if watch is None else watch.run(method, seed, "")
    settings = ScriptSettings(method, seed)
    how = {**how, "log_dir": out, "prints": False}
    _, error = run_recorded(script, arguments, out, settings=settings, progress=progress, **how)
    run = read(out) if error is None or (out / NAME).exists() else refused_run(script.name, method, seed, error)
    if watch is not None:
        watch.done(run)
    return run


def notes_on(run: RecordedRun, seed: int, folder: Path) -> list[str]:
    """What a reader of the comparison must know about this run."""
    found = []
    if run.seed != seed:
        found.append("the script sets its seed itself, so its repetitions have the same one: mh.join without seed=")
    if (folder / "join-2" / NAME).exists():
        found.append("the script joins several times: its first join is compared")
    if run.failure is None and not run.evaluations and all(line["loss"] is None for line in run.steps):
        found.append("the script records neither loss nor accuracy: hands.record(loss=..., accuracy=...)")
    return found
