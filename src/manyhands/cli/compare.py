"""`manyhands compare METHOD...`: runs methods side by side on one task and ranks them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from tyro.conf import FlagCreatePairsOff

from manyhands.cli.options import CommonOptions, fill, option, read_method
from manyhands.cli.output import print_json, print_table
from manyhands.cli.train import build, check, engine, folder, printed_warnings
from manyhands.cli.usage import parse
from manyhands.core.errors import Refused, refuse_unless

if TYPE_CHECKING:
    from manyhands.cli.index import Method
    from manyhands.core.strategy import Strategy
    from manyhands.engines.local import Local
    from manyhands.run.compare import Comparison
    from manyhands.virtual.cluster import Cluster

ABOUT = """Run methods side by side on one task, and rank them by how soon they reach a target.

A method may have knobs: ssp:staleness=3,lr=0.1 or 'topk-sgd:fraction=0.01'. All runs have the same task, machines,
length and seeds. The report is one HTML file that opens offline; it can be built again: manyhands report DIR.

examples:
  manyhands compare bsp ssp easgd diloco
  manyhands compare bsp ssp:staleness=3 ad-psgd --cluster cluster.toml --target accuracy=0.95 --seeds 3
  manyhands compare bsp 'bsp:codec=feedback(topk(0.01))' --workers 2 --link tcp --out runs/sending-less --png
  manyhands compare downpour dc-asgd --virtual --workers 16 --target loss=0.1 --tune --json"""


@dataclass(kw_only=True)
class CompareOptions(CommonOptions):
    """The options of `compare`."""

    methods: Annotated[tuple[str, ...], tyro.conf.Positional, option("methods, each with its knobs", "", "METHOD")]
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


def run(argv: Sequence[str]) -> int:
    """Run all methods, print the ranking, and return the exit code."""
    options = parse(CompareOptions, argv, "compare", ABOUT)
    check(options)
    if not options.methods:
        raise Refused("name the methods first: manyhands compare METHOD...; manyhands list shows all methods")
    for name in ("seeds", "evaluations"):
        refuse_unless(getattr(options, name) >= 1, name, getattr(options, name), ">= 1")
    chosen = {text: knobs_of(text) for text in options.methods}
    if len(chosen) < len(options.methods):
        raise Refused("a method is named twice, but must be named once, or with different knobs")
    on = engine(options)
    from manyhands.core.recipe import spelled  # imports torch

    strategies = [spelled(build(method, knobs), text) for text, (method, knobs) in chosen.items()]
    with printed_warnings(once=True):
        found = compared(strategies, options, on)
    print_json(facts(found)) if options.json else show(found)
    return 0 if any(row["failed"] < row["seeds"] for row in found.rows) else 1


def knobs_of(text: str) -> tuple[Method, dict[str, Any]]:
    """The method and the knobs that a text such as `ssp:staleness=3` names."""
    method, settings = read_method(text)
    return method, fill(method, settings)[0]


def compared(strategies: Sequence[Strategy], options: CompareOptions, on: Local | Cluster) -> Comparison:
    """Run all strategies, and write the report."""
    from manyhands.report.live import choose
    from manyhands.report.measures import parse_target
    from manyhands.report.record import claim
    from manyhands.run.compare import compare

    names = ("data", "steps", "epochs", "batch_size", "seeds", "tune", "evaluations", "png")
    chosen = {name: getattr(options, name) for name in names}
    target = None if options.target is None else parse_target(options.target)
    if options.out is not None:
        claim(options.out, options.force)
    with (
        folder(options.out, f"compare-{options.task}") as out,
        choose([str(name) for name in options.methods], options.seeds, target) as watch,
    ):
        return compare(options.task, strategies, target=target, out=out, force=True, watch=watch, on=on, **chosen)


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
