"""`manyhands run`: starts a user's script once for each rank on this machine."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

import tyro

from manyhands.cli.usage import parse
from manyhands.core.errors import Refused, unknown
from manyhands.runtime.launch.launch import run_script

ABOUT = """Start a script once for each rank on this machine; words after the script are its own arguments.

examples:
  manyhands run -n 4 train.py
  manyhands run -n 4 --servers 1 train.py --epochs 3
  manyhands run -n 2 --link tcp train.py
  manyhands run -n 4 --no-prefix --log-dir logs train.py
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
        join_timeout: seconds from the first rank's mh.join until all ranks must be connected; 60 by default.
    """

    script: Annotated[Path, tyro.conf.Positional]
    workers: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 1
    servers: int = 0
    link: Literal["shm", "tcp"] = "shm"
    bind: str = "127.0.0.1"
    prefix: bool = True
    log_dir: Path | None = None
    join_timeout: float | None = None


def run(argv: Sequence[str]) -> int:
    """Run the script on all ranks, print which were lost, and return the exit code."""
    ours, arguments = split(argv)
    options = parse(ScriptOptions, ours, "run", ABOUT)
    if not options.script.is_file():
        raise Refused(f"there is no script {options.script}")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("manyhands: %(message)s"))
    log = logging.getLogger("manyhands")
    log.addHandler(handler)
    try:
        return run_script(
            str(options.script),
            arguments,
            workers=options.workers,
            servers=options.servers,
            link=options.link,
            bind=options.bind,
            prefix=options.prefix,
            log_dir=options.log_dir,
            deadline=options.join_timeout,
        )
    finally:
        log.removeHandler(handler)


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
