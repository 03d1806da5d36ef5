"""`manyhands train METHOD`: trains a task with one method."""

from __future__ import annotations

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

from manyhands.cli.output import print_json
from manyhands.cli.usage import HelpShown
from manyhands.core.errors import NotWritten, PeerLost, Refused, refuse_unless
from manyhands.core.method_index import Method, methods
from manyhands.runtime.membership.error_codec import exit_code

if TYPE_CHECKING:
    from manyhands.cli.options import CommonOptions, RunOptions
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
    *("bytes_sent", "mean_lag", "max_lag", "dropped", "dropped_mean_lag", "mean_apart", "max_apart", "max_ahead"),
    *("waited_seconds", "memory", "weights_sha256", "record", "lost", "stopped_at"),
)
"""The fields of the result that `--json` prints."""


def run(argv: Sequence[str]) -> int:
    """Train as the command line says, print the result, and return the exit code."""
    method, knobs, options = read(argv)
    check(options)
    interrupted = False
    with printed_warnings() as printed:
        try:
            result = train(method, knobs, options, argv)
        except PeerLost as error:
            if str(error) in printed:  # when it happened
                return exit_code(error)
            raise
        except KeyboardInterrupt as error:
            if not hasattr(error, "result"):  # nothing of it was kept
                raise
            result, interrupted = error.result, True
    link = None if is_virtual(options) else options.link or "shm"
    facts = {"method": method.name, "task": options.task, "seed": options.seed, "world": result.world, "link": link}
    facts["lag"] = result.records[0]["lag"]
    facts |= {name: getattr(result, name) for name in SHOWN}
    print_json(facts) if options.json else print(summary(facts))
    return ending(result, argv, interrupted)


def ending(result: Result, argv: Sequence[str], interrupted: bool) -> int:
    """The exit code of a run that has a result; if it was stopped or its record is incomplete, print that."""
    if result.record_error:
        print(f"manyhands: the record is incomplete: {result.record_error}", file=sys.stderr)
    if result.stopped_at is not None:
        assert result.record is not None
        print(f"manyhands: {saved_in(result.record.parent, argv, result.stopped_at)}", file=sys.stderr)
    if interrupted:
        return exit_code(KeyboardInterrupt())
    if result.stopped_at is not None:
        return STOPPED
    return exit_code(NotWritten()) if result.record_error else 0


def read(argv: Sequence[str]) -> tuple[Method, dict[str, Any], RunOptions]:
    """The method, its knobs and the options of the run."""
    if argv and argv[0] in ("-h", "--help"):
        raise HelpShown(HELP.format(methods="\n".join(f"  {m.name:<11} {m.card.summary}" for m in methods().values())))
    if not argv or argv[0].startswith("-"):
        raise Refused("name the method first: manyhands train METHOD [OPTIONS]; manyhands list shows all methods")
    from manyhands.cli.options import fill, read_options

    method, settings = read_options(argv[0])
    knobs, options = fill(method, [*settings, *argv[1:]])
    return method, knobs, options


def check(options: CommonOptions) -> None:
    """Refuse options that contradict each other, before torch is imported."""
    if options.steps is not None and options.epochs is not None:
        raise Refused(f"steps is {options.steps} and epochs is {options.epochs}, but only one of them may be given")
    for name, own in (("link", "links"), ("bind", "links"), ("spares", "newcomers"), ("join_timeout", "time")):
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


def train(method: Method, knobs: dict[str, Any], options: RunOptions, argv: Sequence[str]) -> Result:
    """Build the strategy and the engine, and run `mh.train`; of an interrupted run say what is saved."""
    on = engine(options)
    from manyhands.report.progress import choose
    from manyhands.run.methods import build  # imports torch
    from manyhands.run.train import train as run

    strategy = build(method, knobs)
    progress = choose(f"{method.name} on {options.task}")
    names = ("data", "seed", "steps", "epochs", "batch_size", "checkpoint_every", "evaluate_every", "resume")
    chosen = {name: getattr(options, name) for name in names}
    chosen["adapters"] = [name.strip() for name in (options.adapters or "").split(",") if name.strip()]
    with folder(options.out, f"{method.name}-{options.task}") as out:
        try:
            return run(options.task, strategy, out=out, progress=progress, on=on, **chosen)
        except KeyboardInterrupt as error:
            progress.stop()
            if not hasattr(error, "result"):
                print(f"manyhands: {saved_in(out, argv)}", file=sys.stderr)
            raise
        finally:
            progress.stop()


def engine(options: CommonOptions) -> Local | Cluster:
    """Where to run: in real processes, or in a virtual cluster; options override what its file says."""
    fields = {
        name: getattr(options, name, None) for name in ("workers", "servers", "link", "bind", "spares", "join_timeout")
    }
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


def saved_in(out: Path, argv: Sequence[str], stopped_at: int | None = None) -> str:
    """What is saved of a run that has ended early, and the command that resumes it."""
    from manyhands.runtime.checkpoint import found_in
    from manyhands.runtime.resume import folder_of

    saved = next(iter(found_in(folder_of(out))), None)
    if saved is None:
        return "nothing was saved" if stopped_at is None else f"stopped at step {stopped_at}; nothing was saved"
    again = shlex.join(["manyhands", "train", *without("--resume", argv), "--resume", str(out)])
    what = "the last checkpoint is of" if stopped_at is None else "stopped at"
    return f"{what} step {saved.step}, saved in {saved.path}; to resume: {again}"


def without(flag: str, argv: Sequence[str]) -> list[str]:
    """A command line without one option and its value."""
    words, kept = iter(argv), []
    for word in words:
        if word == flag:
            next(words, None)
        elif not word.startswith(f"{flag}="):
            kept.append(word)
    return kept
