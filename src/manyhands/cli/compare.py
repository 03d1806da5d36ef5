"""`manyhands compare METHOD...`: runs methods side by side on one task and ranks them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from tyro.conf import FlagCreatePairsOff

from manyhands.cli.options import CommonOptions, option
from manyhands.cli.output import print_json, print_table
from manyhands.cli.train import check, engine, folder, printed_warnings
from manyhands.cli.usage import parse
from manyhands.core.errors import Refused, refuse_unless
from manyhands.core.method_text import TEAM, read_knobs, with_team

if TYPE_CHECKING:
    from manyhands.report.live import LiveBoard
    from manyhands.report.measures import Target
    from manyhands.run.compare import Comparison

ABOUT = """Run methods side by side on one task, and rank them by how soon they reach a target.

A method may have knobs: ssp:staleness=3,lr=0.1 or 'topk-sgd:fraction=0.01'. All runs have the same task, machines,
length and seeds. The report is one HTML file that opens offline; it can be built again: manyhands report DIR.

examples:
  manyhands compare bsp ssp easgd diloco
  manyhands compare bsp ssp:staleness=3 ad-psgd --cluster cluster.toml --target accuracy=0.95 --seeds 3
  manyhands compare bsp 'bsp:codec=feedback(topk(0.01))' --workers 2 --link tcp --out runs/sending-less --png
  manyhands compare downpour dc-asgd --virtual --workers 16 --target loss=0.1 --tune --json
  manyhands compare bsp diloco ssp --workers 4 --team 'piped(stages=2)'
  manyhands compare bsp ssp diloco --workers 2 --target accuracy=0.95 -- train.py --epochs 3

After -- comes a script of your own with its arguments: each method replaces the one it joins with, and what it passes
to hands.record (loss, accuracy) is compared. Its output is written to log files beside the records."""


@dataclass(kw_only=True)
class CompareOptions(CommonOptions):
    """The options of `compare`."""

    methods: Annotated[tuple[str, ...], tyro.conf.Positional, option("methods, each with its knobs", "", "METHOD")]
    team: Annotated[str | None, option(TEAM.help, "none", "TEAM")] = None
    target: Annotated[str | None, option("what is to be reached: accuracy=0.95 or loss=0.1", "none", "WHAT=VALUE")] = (
        None
    )
    seeds: Annotated[int, option("repetitions, with seeds 0, 1, ...: shows medians and spread")] = 1
    tune: FlagCreatePairsOff[
        Annotated[bool, option("choose the learning rate of every method first, with the same budget", "no")]
    ] = False
    evaluations: Annotated[int, option("how often each run is evaluated on the test data")] = 20
    out: Annotated[Path | None, option("where records and report go", "runs/compare-TASK-TIME", "DIR")] = None
    force: FlagCreatePairsOff[Annotated[bool, option("write into a folder that is not empty", "no")]] = False
    png: FlagCreatePairsOff[Annotated[bool, option("also write the main figures as PNG files", "no")]] = False


SCRIPTS_HAVE = {
    "--task": "the script is the task",
    **dict.fromkeys(("--steps", "--epochs", "--batch-size", "--data"), "the script decides; give it words of its own"),
    **dict.fromkeys(("--virtual", "--cluster"), "a script runs in real processes"),
    "--tune": "the script chooses learning rates",
    "--evaluations": "the script evaluates when it calls hands.record(accuracy=...)",
}
"""Options that a comparison of scripts refuses, each with the reason."""


def split(argv: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """The words for `manyhands compare`, and those after `--`: a script and its arguments; None if there are none."""
    if "--" not in argv:
        return list(argv), None
    at = list(argv).index("--")
    if at + 1 == len(argv):
        raise Refused("the script is missing after --: manyhands compare METHOD... -- SCRIPT [ARGUMENTS]")
    return list(argv[:at]), list(argv[at + 1 :])


def refuse_task_options(argv: Sequence[str]) -> None:
    """Refuse options that only a comparison on a task has."""
    for word in argv:
        flag = word.partition("=")[0].replace("_", "-")
        if flag in SCRIPTS_HAVE:
            raise Refused(f"{flag} was given, but must be left out when scripts are compared: {SCRIPTS_HAVE[flag]}")


def run(argv: Sequence[str]) -> int:
    """Run all methods, print the ranking, and return the exit code."""
    ours, script = split(argv)
    options = parse(CompareOptions, ours, "compare", ABOUT)
    if script is not None:
        refuse_task_options(ours)
    check(options)
    if not options.methods:
        raise Refused("name the methods first: manyhands compare METHOD...; manyhands list shows all methods")
    for name in ("seeds", "evaluations"):
        refuse_unless(getattr(options, name) >= 1, name, getattr(options, name), ">= 1")
    chosen = {text: read_knobs(text) for text in (with_team(text, options.team) for text in options.methods)}
    if len(chosen) < len(options.methods):
        raise Refused("a method is named twice, but must be named once, or with different knobs")
    with printed_warnings(once=True):
        found = compared(list(chosen), options) if script is None else compared_scripts(script, list(chosen), options)
    print_json(facts(found)) if options.json else show(found)
    return 0 if any(row["failed"] < row["seeds"] for row in found.rows) else 1


def compared(methods: Sequence[str], options: CompareOptions) -> Comparison:
    """Run all methods on the task, and write the report."""
    on = engine(options)
    from manyhands.run.compare import compare
    from manyhands.run.methods import strategy_of  # imports torch

    names = ("data", "steps", "epochs", "batch_size", "seeds", "tune", "evaluations", "png")
    chosen = {name: getattr(options, name) for name in names}
    strategies = [strategy_of(text) for text in methods]
    with outlet(options, f"compare-{options.task}") as (out, target, watch):
        return compare(options.task, strategies, target=target, out=out, force=True, watch=watch, on=on, **chosen)


def compared_scripts(words: Sequence[str], methods: Sequence[str], options: CompareOptions) -> Comparison:
    """Run a script with all methods, and write the report."""
    script, *arguments = words
    if not Path(script).is_file():
        raise Refused(f"there is no script {script}")
    from manyhands.run.compare_scripts import compare_scripts  # imports torch

    names = ("workers", "servers", "link", "bind")
    how = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    with outlet(options, f"compare-{Path(script).stem}") as (out, target, watch):
        chosen: dict[str, Any] = {"target": target, "seeds": options.seeds, "png": options.png, "watch": watch}
        return compare_scripts(Path(script), arguments, methods, out=out, **chosen, **how)


@contextmanager
def outlet(options: CompareOptions, title: str) -> Iterator[tuple[Path, Target | None, LiveBoard]]:
    """The folder for records and report, the target, and the display."""
    from manyhands.report.live import choose
    from manyhands.report.measures import parse_target
    from manyhands.report.record import claim

    target = None if options.target is None else parse_target(options.target)
    if options.out is not None:
        claim(options.out, options.force)
    names = [str(name) for name in options.methods]
    with folder(options.out, title) as out, choose(names, options.seeds, target) as watch:
        yield out, target, watch


def facts(found: Comparison) -> dict[str, Any]:
    """The object that `--json` prints."""
    target = None if found.target is None else {"what": found.target.what, "value": found.target.value}
    return {
        "task": found.task,
        "target": target,
        "ranking": found.rows,
        "notes": found.notes,
        "records": [None if run.path is None else str(run.path) for run in found.runs],
        "report": found.report,
    }


def show(found: Comparison) -> None:
    """Print the ranking as a table."""
    from manyhands.report.result_tables import ranking_cells, ranking_columns

    print_table(ranking_columns(found.target), [ranking_cells(row, found.target) for row in found.rows])
    for row in found.rows:
        if row["failure"] is not None:
            print(f"{row['method']} failed: {row['failure']}")
    for note in found.notes:
        print(note)
    print(f"report: {found.report}")
    sys.stdout.flush()
