"""`manyhands train METHOD`: trains a task with one method."""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyhands.cli.index import Method, methods
from manyhands.cli.output import print_json
from manyhands.cli.usage import HelpShown
from manyhands.core.errors import Refused, refuse_unless

if TYPE_CHECKING:
    from manyhands.cli.options import Run
    from manyhands.result import Result
    from manyhands.virtual.cluster import Cluster

HELP = """usage: manyhands train METHOD [OPTIONS]

Train a task with one method. Every method has its own knobs: manyhands train METHOD --help

methods:
{methods}

examples:
  manyhands train ssp --virtual --workers 4 --staleness 3
  manyhands train 'ssp:staleness=3,codec=feedback(topk(0.01))' --virtual
  manyhands train gpipe --help"""

SHOWN = (
    *("workers", "servers", "steps", "seconds", "wall_seconds", "samples_per_second", "final_loss", "test_accuracy"),
    *("bytes_sent", "mean_lag", "max_lag", "waited_seconds", "weights_sha256", "record", "lost"),
)
"""What `--json` takes over from the result."""


def run(argv: Sequence[str]) -> int:
    """Read, check, train, report."""
    if argv and argv[0] in ("-h", "--help"):
        raise HelpShown(HELP.format(methods="\n".join(f"  {m.name:<11} {m.card.summary}" for m in methods().values())))
    if not argv or argv[0].startswith("-"):
        raise Refused("name the method first: manyhands train METHOD [OPTIONS]; manyhands list shows all methods")
    from manyhands.cli.options import fill, read_method

    method, settings = read_method(argv[0])
    knobs, options = fill(method, [*settings, *argv[1:]])
    if "lr" in knobs and knobs.get("rule") is not None:
        raise Refused(f"lr is {knobs['lr']}, but the rule has a learning rate of its own: give it there")
    check(options)
    result = train(method, knobs, options)
    facts = {"method": method.name, "task": options.task, "seed": options.seed, "world": "virtual"}
    facts |= {name: getattr(result, name) for name in SHOWN}
    print_json(facts) if options.json else print(summary(facts))
    return 0


def check(options: Run) -> None:
    """Refuse what can be seen to be wrong without starting anything."""
    if options.steps is not None and options.epochs is not None:
        raise Refused(f"steps is {options.steps} and epochs is {options.epochs}, but only one of them may be given")
    if not (options.virtual or options.cluster):
        raise Refused("real workers come with the next release: add --virtual to train in a virtual cluster")
    for name in ("steps", "epochs", "batch_size"):
        value = getattr(options, name)
        refuse_unless(value is None or value > 0, name, value, "> 0")


def train(method: Method, knobs: dict[str, Any], options: Run) -> Result:
    """Build the cluster, the strategy and the task, and run the job."""
    cluster = machines(options)
    from manyhands import jobs, tasks  # only now: this is the first that needs torch
    from manyhands.cli.parts import Part
    from manyhands.report.progress import choose

    recipe = getattr(importlib.import_module(f"manyhands.catalog.{method.family}"), method.function)
    strategy = recipe(**{name: knob.build() if isinstance(knob, Part) else knob for name, knob in knobs.items()})
    task = tasks.load(options.task, options.data)
    progress = choose(f"{method.name} on {task.name}")
    budget = {name: getattr(options, name) for name in ("seed", "steps", "epochs", "batch_size")}
    with folder(options.out, f"{method.name}-{options.task}") as out:
        try:
            return jobs.train(task, strategy, cluster=cluster, out=out, progress=progress, **budget)
        finally:
            progress.stop()


def machines(options: Run) -> Cluster:
    """The virtual cluster; what the command line says wins over the file."""
    from manyhands.virtual.cluster import Cluster

    cluster = Cluster.from_file(options.cluster) if options.cluster else Cluster()
    sizes = {name: getattr(options, name) for name in ("workers", "servers")}
    return replace(cluster, **{name: size for name, size in sizes.items() if size is not None})


@contextmanager
def folder(chosen: Path | None, title: str) -> Iterator[Path]:
    """Where the record goes: `chosen`, or a new folder of this run alone, which vanishes if nothing came of it."""
    if chosen is not None:
        yield chosen
        return
    stem = Path("runs", re.sub(r"[^\w.-]+", "-", title) + time.strftime("-%Y%m%d-%H%M%S"))
    for number in count(1):
        out = stem if number == 1 else stem.with_name(f"{stem.name}-{number}")
        with suppress(FileExistsError):
            out.mkdir(parents=True)
            break
    try:
        yield out
    finally:
        with suppress(OSError):  # it has a record in it
            out.rmdir()


def summary(facts: dict[str, Any]) -> str:
    """The result for people."""
    f = facts
    rows = {
        "test accuracy": None if f["test_accuracy"] is None else f"{f['test_accuracy']:.4f}",
        "final loss": None if f["final_loss"] is None else f"{f['final_loss']:.4f}",
        "time": f"{f['seconds']:.4g} virtual seconds ({f['wall_seconds']:.1f} s here)",
        "speed": f"{f['samples_per_second']:,.0f} samples per virtual second, {f['steps']:,} steps",
        "sent": f"{f['bytes_sent'] / 1e6:,.1f} MB",
        "lag": None if f["mean_lag"] is None else f"{f['mean_lag']:.2f} on average, {f['max_lag']} at most",
        "waited": f"{f['waited_seconds']:.4g} s",
        "record": f["record"],
    }
    rows |= {f"lost rank {rank}": why for rank, why in f["lost"]}
    title = f"{f['method']} on {f['task']}: {f['workers']} workers, {f['servers']} servers, seed {f['seed']}"
    return "\n".join([title, *(f"  {name:<14} {text}" for name, text in rows.items() if text is not None)])
