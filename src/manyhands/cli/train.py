"""`manyhands train METHOD`: trains a task with one method."""

from __future__ import annotations

import importlib
import logging
import re
import shlex
import signal
import sys
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
from manyhands.core.errors import PeerLost, Refused, refuse_unless
from manyhands.runtime.membership.error_codec import exit_code

if TYPE_CHECKING:
    from manyhands.cli.options import CommonOptions, RunOptions
    from manyhands.core.strategy import Strategy
    from manyhands.engines.local import Local
    from manyhands.run.result import Result
    from manyhands.virtual.cluster import Cluster

HELP = """usage: manyhands train METHOD [OPTIONS]

Train a task with one method. Every method has its own knobs: manyhands train METHOD --help

methods:
{methods}

examples:
  manyhands train ssp --workers 2 --staleness 3
  manyhands train bsp --link tcp --out runs/mine --checkpoint-every 100
  manyhands train bsp --link tcp --resume runs/mine
  manyhands train ssp --virtual --workers 64
  manyhands train 'ssp:staleness=3,codec=feedback(topk(0.01))' --virtual
  manyhands train gpipe --help"""

STOPPED = 128 + signal.SIGTERM
"""The exit code of a run that was stopped by SIGTERM between two steps."""

SHOWN = (
    *("workers", "servers", "steps", "seconds", "wall_seconds", "samples_per_second", "final_loss", "test_accuracy"),
    *("bytes_sent", "mean_lag", "max_lag", "waited_seconds", "weights_sha256", "record", "lost", "stopped_at"),
)
"""The fields of the result that `--json` prints."""


def run(argv: Sequence[str]) -> int:
    """Train as the command line says, print the result, and return the exit code."""
    method, knobs, options = read(argv)
    check(options)
    with printed_warnings() as printed:
        try:
            result = train(method, knobs, options)
        except PeerLost as error:
            if str(error) in printed:  # when it happened
                return exit_code(error)
            raise
    link = None if is_virtual(options) else options.link or "shm"
    facts = {"method": method.name, "task": options.task, "seed": options.seed, "world": result.world, "link": link}
    facts |= {name: getattr(result, name) for name in SHOWN}
    print_json(facts) if options.json else print(summary(facts))
    if result.stopped_at is None:
        return 0
    print(f"manyhands: {how_to_resume(result, argv)}", file=sys.stderr)
    return STOPPED


def read(argv: Sequence[str]) -> tuple[Method, dict[str, Any], RunOptions]:
    """The method, its knobs and the options of the run."""
    if argv and argv[0] in ("-h", "--help"):
        raise HelpShown(HELP.format(methods="\n".join(f"  {m.name:<11} {m.card.summary}" for m in methods().values())))
    if not argv or argv[0].startswith("-"):
        raise Refused("name the method first: manyhands train METHOD [OPTIONS]; manyhands list shows all methods")
    from manyhands.cli.options import fill, read_method

    method, settings = read_method(argv[0])
    knobs, options = fill(method, [*settings, *argv[1:]])
    return method, knobs, options


def check(options: CommonOptions) -> None:
    """Refuse options that contradict each other, before torch is imported."""
    if options.steps is not None and options.epochs is not None:
        raise Refused(f"steps is {options.steps} and epochs is {options.epochs}, but only one of them may be given")
    for name, own in (("link", "links"), ("bind", "links"), ("spares", "newcomers")):
        value = getattr(options, name, None)
        real = value is None or not is_virtual(options)
        refuse_unless(real, name, value, f"left out: a virtual cluster has {own} of its own")
    tcp = options.bind is None or options.link == "tcp"
    refuse_unless(tcp, "bind", options.bind, "left out without --link tcp: no rank listens on an address")
    for name in ("steps", "epochs", "batch_size", "checkpoint_every", "evaluate_every"):
        value = getattr(options, name, None)
        refuse_unless(value is None or value > 0, name, value, "> 0")


def is_virtual(options: CommonOptions) -> bool:
    """Whether the run is in virtual time: with --virtual, or with a file that describes a cluster."""
    return options.virtual or options.cluster is not None


def train(method: Method, knobs: dict[str, Any], options: RunOptions) -> Result:
    """Build the strategy and the engine, and run `mh.train`."""
    on = engine(options)
    from manyhands.report.progress import choose
    from manyhands.run.train import train as run  # imports torch

    strategy = build(method, knobs)
    progress = choose(f"{method.name} on {options.task}")
    names = ("data", "seed", "steps", "epochs", "batch_size", "checkpoint_every", "evaluate_every", "resume")
    chosen = {name: getattr(options, name) for name in names}
    chosen["adapters"] = [name.strip() for name in (options.adapters or "").split(",") if name.strip()]
    with folder(options.out, f"{method.name}-{options.task}") as out:
        try:
            return run(options.task, strategy, out=out, progress=progress, on=on, **chosen)
        finally:
            progress.stop()


def build(method: Method, knobs: dict[str, Any]) -> Strategy:
    """The strategy that a recipe makes of its knobs; it keeps the text in which they were given."""
    from manyhands.cli.parts import PartSpec
    from manyhands.core.recipe import spelled

    recipe = getattr(importlib.import_module("manyhands.catalog"), method.function)
    strategy: Strategy = recipe(
        **{name: knob.build() if isinstance(knob, PartSpec) else knob for name, knob in knobs.items()}
    )
    text = ",".join(f"{name}={knob}" for name, knob in knobs.items())
    return spelled(strategy, f"{method.name}:{text}" if text else method.name)


def engine(options: CommonOptions) -> Local | Cluster:
    """Where to run: in real processes, or in a virtual cluster; options override what its file says."""
    fields = {name: getattr(options, name, None) for name in ("workers", "servers", "link", "bind", "spares")}
    given: dict[str, Any] = {name: value for name, value in fields.items() if value is not None}
    if is_virtual(options):
        from manyhands.virtual.cluster import Cluster

        return replace(Cluster.from_file(options.cluster) if options.cluster else Cluster(), **given)
    from manyhands.engines.local import Local

    return Local(**given)


class _WarningPrinter(logging.Handler):
    """Prints each warning as a line on stderr when it is logged, and keeps it; with `once` not the same one again."""

    def __init__(self, once: bool) -> None:
        super().__init__(logging.WARNING)
        self.printed: list[str] = []
        self.once = once

    def emit(self, record: logging.LogRecord) -> None:
        if self.once and record.getMessage() in self.printed:
            return
        self.printed.append(record.getMessage())
        print(f"manyhands: {self.printed[-1]}", file=sys.stderr, flush=True)


@contextmanager
def printed_warnings(*, once: bool = False) -> Iterator[list[str]]:
    """Print the library's warnings during a run, such as a lost rank or a refused connection; yields the list."""
    printer, log = _WarningPrinter(once), logging.getLogger("manyhands")
    log.addHandler(printer)
    try:
        yield printer.printed
    finally:
        log.removeHandler(printer)


@contextmanager
def folder(chosen: Path | None, title: str) -> Iterator[Path]:
    """The folder of the record: `chosen`, or a new one with a time in its name, which is removed if it stays empty."""
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
        with suppress(OSError):  # it is not empty
            out.rmdir()


def summary(facts: dict[str, Any]) -> str:
    """The result as a few lines of text."""
    from manyhands.report.result_tables import result_rows, result_title

    lost = [f"  lost rank {rank}: {why}" for rank, why in facts["lost"]]
    rows = [f"  {name:<14} {text}" for name, text in result_rows(facts).items()]
    return "\n".join([result_title(facts), *rows, *lost])


def how_to_resume(result: Result, argv: Sequence[str]) -> str:
    """Where a run was stopped, what was saved, and the command that resumes it."""
    from manyhands.runtime.checkpoint import found_in
    from manyhands.runtime.resume import folder_of

    assert result.record is not None
    out = result.record.parent
    saved = next(iter(found_in(folder_of(out))), None)
    if saved is None:
        return f"stopped at step {result.stopped_at}; nothing was saved"
    again = shlex.join(["manyhands", "train", *without("--resume", argv), "--resume", str(out)])
    return f"stopped at step {saved.step}, saved in {saved.path}; to resume: {again}"


def without(flag: str, argv: Sequence[str]) -> list[str]:
    """A command line without one option and its value."""
    words, kept = iter(argv), []
    for word in words:
        if word == flag:
            next(words, None)
        elif not word.startswith(f"{flag}="):
            kept.append(word)
    return kept
