"""`manyhands run`: starts a user's script once for each rank on this machine."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

import tyro

from manyhands.cli.usage import parse
from manyhands.core.errors import Refused, refuse_unless, unknown
from manyhands.core.method_text import read_knobs
from manyhands.runtime.launch.launch import run_script
from manyhands.runtime.launch.script_settings import ScriptSettings

ABOUT = """Start a script once for each rank on this machine; words after the script are its own arguments.

examples:
  manyhands run -n 4 train.py
  manyhands run -n 4 --servers 1 train.py --epochs 3
  manyhands run -n 2 --link tcp train.py
  manyhands run -n 4 --no-prefix --log-dir logs train.py
  manyhands run -n 4 --method ssp:staleness=3 --out runs/mine train.py
  manyhands run -n 4 --join-timeout 600 train.py"""
FLAGS = ("-h", "--help", "--prefix", "--no-prefix")
"""Options without a value."""


@dataclass
class ScriptOptions:
    """The options of `run`.

    Args:
        script: the Python file that every rank runs.
        workers: how many workers.
        servers: how many server ranks.
        link: how ranks exchange tensors: through shared memory, or through sockets as between hosts.
        bind: the address to listen on with --link tcp.
        prefix: whether lines that the ranks print begin with their rank, if there are several.
        log_dir: a folder for the files rank0.log, rank1.log, ... with what each rank prints.
        method: the method with its knobs, instead of the script's own: ssp:staleness=3.
        out: a folder for the record of the run, which `manyhands report` reads.
        adapters: where the record is also sent: tensorboard, mlflow.
        join_timeout: seconds from the first rank's mh.join until all ranks must be connected; 60 by default.
    """

    script: Annotated[Path, tyro.conf.Positional]
    workers: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 1
    servers: int = 0
    link: Literal["shm", "tcp"] = "shm"
    bind: str = "127.0.0.1"
    prefix: bool = True
    log_dir: Path | None = None
    method: str | None = None
    out: Path | None = None
    adapters: str | None = None
    join_timeout: float | None = None


def run(argv: Sequence[str]) -> int:
    """Run the script on all ranks, print which were lost, and return the exit code."""
    ours, arguments = split(argv)
    options = parse(ScriptOptions, ours, "run", ABOUT)
    if not options.script.is_file():
        raise Refused(f"there is no script {options.script}")
    if options.method is not None:
        read_knobs(options.method)  # refused here, before a rank is started
    needless = options.adapters is None or options.out is not None
    refuse_unless(needless, "adapters", options.adapters, "left out without --out DIR: they get the lines of a record")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("manyhands: %(message)s"))
    log = logging.getLogger("manyhands")
    log.addHandler(handler)
    try:
        return start(options, arguments)
    finally:
        log.removeHandler(handler)


def start(options: ScriptOptions, arguments: Sequence[str]) -> int:
    """Start the ranks, with a record if there is a folder for it; the exit code."""
    names = ("workers", "servers", "link", "bind", "prefix", "log_dir")
    chosen = {name: getattr(options, name) for name in names} | {"deadline": options.join_timeout}
    settings = ScriptSettings(options.method)
    if options.out is None:
        return run_script(str(options.script), arguments, settings=settings, **chosen)
    from manyhands.run.script_record import run_recorded  # imports torch

    adapters = [name.strip() for name in (options.adapters or "").split(",") if name.strip()]
    out = options.out
    code, failure = run_recorded(options.script, arguments, out, adapters=adapters, settings=settings, **chosen)
    if failure is not None and not code:
        logging.getLogger("manyhands").warning("no result was recorded in %s: %s", out, failure)
    return code


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words for `manyhands run`, up to the script, and those for the script."""
    names = [field.name.replace("_", "-") for field in fields(ScriptOptions) if field.name != "script"]
    known = ["-n", *FLAGS, *(f"--{name}" for name in names)]
    takes_value = False
    for position, word in enumerate(argv):
        flag, _, value = word.partition("=")
        if takes_value:
            takes_value = False
        elif not word.startswith("-"):
            return list(argv[: position + 1]), list(argv[position + 1 :])
        elif flag not in known:
            raise unknown("option of manyhands run", flag, known)
        else:
            takes_value = not value and flag not in FLAGS
    return list(argv), []
