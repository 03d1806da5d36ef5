"""Launching: starts the ranks of a job on this machine, supervises them, and returns their results."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from manyhands.core.errors import PeerLost, Refused
from manyhands.runtime.launch.program import pickled
from manyhands.runtime.launch.rank_main import PR_SET_PDEATHSIG
from manyhands.runtime.launch.rank_output import RankOutput
from manyhands.runtime.launch.rank_processes import Context, RankProcesses
from manyhands.runtime.launch.script_settings import ScriptSettings
from manyhands.runtime.membership.error_codec import exit_code, unpack
from manyhands.runtime.membership.watcher import STOPPED, Watcher
from manyhands.runtime.rank_spec import RankSpec, rank_specs, worker_server_roles

if TYPE_CHECKING:
    from manyhands.core.port import Transport

log = logging.getLogger("manyhands")

BEFORE_SCRIPT = f"""
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl({PR_SET_PDEATHSIG}, signal.SIGKILL)
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""
"""What a script's process runs first: from then on it dies with its parent, and ignores Ctrl-C. Takes 20 ms."""

ASKED = "interrupted: the run stops after this step and is saved; a second Ctrl-C stops it at once"


@dataclass(frozen=True)
class Launched:
    """The outcome of a launch.

    Args:
        results: what the program returned on each rank; None for a lost rank.
        lost: the lost ranks, and why.
        interrupted: whether Ctrl-C has stopped it, so that all ranks returned early.
    """

    results: list[Any | None]
    lost: list[tuple[int, str]]
    interrupted: bool = False


def launch(
    program: Callable[[Transport], Any],
    *,
    roles: Mapping[str, int] | None = None,
    workers: int | None = None,
    servers: int = 0,
    hosts: tuple[int, ...] | None = None,
    link: str = "shm",
    bind: str = "127.0.0.1",
    deadline: float | None = None,
    context: Context = "spawn",
    checks_lending: bool = False,
    on_lines: Callable[[Any], None] | None = None,
    spares: int = 0,
    saves: bool = False,
) -> Launched:
    """Run `program(transport)` in one new process for each rank, and wait. Raises the error that ended the run.

    `roles` counts the ranks of each role, in rank order; `workers` and `servers` are the short form. A spare worker is
    started when a worker is lost, or at SIGUSR1. If the program `saves` when it is asked to stop, Ctrl-C asks it to.
    """
    if (roles is None) == (workers is None) or (roles is not None and servers):
        raise Refused(f"roles is {roles} and workers is {workers}, but exactly one of them must be given")
    specs = rank_specs(
        worker_server_roles(workers, servers) if workers is not None else roles or {},
        hosts=hosts,
        link=link,
        bind=bind,
        deadline=deadline,
        checks_lending=checks_lending,
        spares=spares,
    )
    with closing(RankProcesses(specs, pickled(program), context)) as processes:

        def replace(lost: int) -> None:
            if specs[0].roles[lost] == "worker":
                processes.start_spare(watcher)

        watcher = Watcher(specs[0], on_lines=on_lines, on_loss=replace)
        with _start_spare_on_sigusr1(watcher, processes) if spares else nullcontext():
            interrupted = _supervise(watcher, partial(processes.start, watcher), saves=saves)
    if watcher.cause is not None:
        raise unpack(watcher.cause)
    results = processes.results()
    excused = results.keys() | {rank for rank, _ in watcher.lost} | set(specs[0].pending_ranks)
    for rank in watcher.endings.keys() - excused:
        raise PeerLost(rank, f"it left, but its result is missing: {watcher.endings[rank]}")
    return Launched([results.get(rank) for rank in range(len(specs))], watcher.lost, interrupted)


class ScriptObserver(Protocol):
    """Keeps the record of a script."""

    def lines(self, rows: Any) -> None:
        """A rank has sent something for the record; called in the watcher's thread."""

    def ended(self, code: int, error: BaseException | None, lost: Sequence[tuple[int, str]]) -> None:
        """All ranks have ended: the exit code, the error that ended the run, if one did, and the lost ranks."""


NO_SETTINGS = ScriptSettings()


def run_script(
    script: str,
    arguments: Sequence[str],
    *,
    workers: int,
    servers: int = 0,
    link: str = "shm",
    bind: str = "127.0.0.1",
    deadline: float | None = None,
    prefix: bool = True,
    log_dir: Path | None = None,
    prints: bool = True,
    settings: ScriptSettings = NO_SETTINGS,
    observer: ScriptObserver | None = None,
) -> int:
    """Run a script once for each rank, and wait. Returns the exit code; the log names the lost ranks.

    The output of several ranks is printed in whole lines, which begin with the rank if `prefix`; one rank alone writes
    to the terminal itself. With `log_dir` each rank's output is also written to a file there, or, unless it `prints`,
    only there. The `settings` replace those of the script; the `observer` gets the lines for its record.
    """
    roles, records = worker_server_roles(workers, servers), observer is not None
    specs = rank_specs(roles, link=link, bind=bind, deadline=deadline, records=records)
    several = len(specs) > 1
    output = None
    if several or log_dir or not prints:
        output = RankOutput(len(specs), prefix=prefix and several, folder=log_dir, prints=prints)
    processes: list[subprocess.Popen[bytes]] = []
    with closing(output) if output else nullcontext():
        watcher = Watcher(specs[0], on_lines=None if observer is None else observer.lines, own_loop=True)
        command, chosen = [script, *arguments], settings.environment()
        try:
            with _on_signal(signal.SIGUSR1, lambda *_: watcher.finish_once()):  # as Slurm sends before it stops a job
                begin = partial(_start, processes, command, specs, watcher, output, chosen)
                _supervise(watcher, begin, patient=True)
        finally:
            for process in processes:
                process.wait()
    code = _exit_code_of_run(watcher)
    if observer is not None:
        observer.ended(code, None if watcher.cause is None else unpack(watcher.cause), watcher.lost)
    return code


def _start(
    processes: list[subprocess.Popen[bytes]],
    command: list[str],
    specs: Sequence[RankSpec],
    watcher: Watcher,
    output: RankOutput | None,
    settings: Mapping[str, str],
) -> None:
    """Standard input is closed: a process that is not in the foreground is stopped when it reads from the terminal."""
    common = {"OMP_NUM_THREADS": "1", **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    if output is not None:
        common["PYTHONUNBUFFERED"] = "1"  # else a pipe gets a line when many have been printed
    for spec in specs:
        with output.pipes(spec.rank) if output is not None else nullcontext((None, None)) as (out, err):
            process = subprocess.Popen(
                [sys.executable, "-P", "-S", "-c", BEFORE_SCRIPT, str(os.getpid()), *command],
                env={**common, **settings, **spec.environment()},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                process_group=0,
            )
        processes.append(process)
        watcher.watch(spec.rank, process.pid, process.poll)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
        return port


def _exit_code_of_run(watcher: Watcher) -> int:
    """The exit code of the error that ended the run, else that of the first rank that failed."""
    facts, codes = watcher.cause, {rank: ending.code or 0 for rank, ending in watcher.endings.items()}
    if facts is not None:
        error, is_logged = unpack(facts), (facts.get("rank"), facts.get("why")) in watcher.lost
        if not is_logged:
            log.error("%s", error)
        own = codes.get(facts["rank"], 0) if facts["kind"] == "failed" or is_logged else 0
        return own if own > 0 else facts.get("code") or exit_code(error)
    lost = {rank for rank, _ in watcher.lost}
    for rank, code in codes.items():
        if code and rank not in lost:
            how = f"exit code {code}" if code > 0 else watcher.endings[rank]
            if not (watcher.finishing and code == STOPPED):
                log.error("rank %d failed after it had left: %s", rank, how)
            return code if code > 0 else 128 - code
    if lost >= codes.keys():  # no rank has completed the run
        return next((code for code in codes.values() if code > 0), exit_code(PeerLost(0, "")))
    return 0


def _supervise(watcher: Watcher, start: Callable[[], None], *, patient: bool = False, saves: bool = False) -> bool:
    """Start the ranks and wait until they have ended. Whatever happens, none is left running.

    Returns whether an interrupt has stopped ranks that save.
    """
    stop = StopRequests(watcher)
    asks = saves and signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else it is ignored, or the user's
    on_interrupt = _on_signal(signal.SIGINT, stop.interrupt) if asks else nullcontext()
    with watcher, _on_signal(signal.SIGTERM, stop.terminate), on_interrupt:
        with _interrupts_deferred():  # an interrupt while a thread starts would leave unknown whether it runs
            watcher.start(patient=patient)
            start()
        watcher.wait()
    return stop.interrupted


class StopRequests:
    """What SIGTERM and Ctrl-C do to a run that saves.

    SIGTERM   stop after the current step      a second one: stop at once
    Ctrl-C    the same                         a second one, or before the ranks have begun: KeyboardInterrupt,
                                               which stops it at once
    """

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._asked = self.interrupted = False

    def terminate(self, *_: object) -> None:
        """Handle SIGTERM."""
        self._asked = True
        self._watcher.finish()

    def interrupt(self, *_: object) -> None:
        """Handle Ctrl-C. The watcher's thread logs: a handler must not, because it may interrupt a print."""
        if self._asked or not self._watcher.has_begun:
            raise KeyboardInterrupt
        self._asked = self.interrupted = True
        self._watcher.loop.post(partial(log.warning, ASKED))
        self._watcher.finish()


@contextmanager
def _on_signal(number: signal.Signals, handler: Any) -> Iterator[None]:
    """Handle a signal, if this is the main thread: Python allows it in no other."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


@contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Ctrl-C takes effect afterwards. Processes started here ignore it: the launcher stops them in order."""
    received: list[int] = []
    with _on_signal(signal.SIGINT, lambda number, _: received.append(number)):
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # which those processes inherit
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if received:
        signal.raise_signal(signal.SIGINT)


def _start_spare_on_sigusr1(watcher: Watcher, processes: RankProcesses) -> AbstractContextManager[None]:
    return _on_signal(signal.SIGUSR1, lambda *_: watcher.loop.post(partial(processes.start_spare, watcher)))
