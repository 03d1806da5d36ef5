"""Launching: starts the ranks of a job on this machine, watches over them, and says how it went."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from manyhands.core.errors import PeerLost, Refused
from manyhands.runtime.crew import Context, Crew
from manyhands.runtime.failures import exit_code, unpack
from manyhands.runtime.rank import PR_SET_PDEATHSIG, TOP_LEVEL
from manyhands.runtime.seat import Seat, seats
from manyhands.runtime.watch import Watcher

if TYPE_CHECKING:
    from manyhands.core.protocols import Transport

log = logging.getLogger("manyhands")

BEFORE_SCRIPT = f"""
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl({PR_SET_PDEATHSIG}, signal.SIGKILL)
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""
"""What a script's process does first: from then on it dies with its parent, and Ctrl-C is not for it. Takes 20 ms."""


@dataclass(frozen=True)
class Launched:
    """What came of a launch.

    Args:
        results: what the program returned on each rank; None where it was lost.
        lost: the ranks that were lost, and why.
    """

    results: list[Any | None]
    lost: list[tuple[int, str]]


def launch(
    program: Callable[[Transport], Any],
    *,
    workers: int,
    servers: int = 0,
    hosts: tuple[int, ...] | None = None,
    link: str = "shm",
    bind: str = "127.0.0.1",
    deadline: float = 60.0,
    context: Context = "spawn",
    checks_lending: bool = False,
    on_lines: Callable[[Any], None] | None = None,
    spares: int = 0,
) -> Launched:
    """Run `program(transport)` in one new process for each rank, and wait. Raises whatever ended the run.

    A spare is started when a worker is lost, or at SIGUSR1.
    """
    packed = _packed(program)
    places = seats(
        workers,
        servers,
        hosts=hosts,
        link=link,
        bind=bind,
        deadline=deadline,
        checks_lending=checks_lending,
        spares=spares,
    )
    with closing(Crew(places, packed, context)) as crew:

        def replace(lost: int) -> None:
            if places[0].roles[lost] == "worker":
                crew.start_spare(watcher)

        watcher = Watcher(places[0], on_lines=on_lines, on_loss=replace)
        with _calling_spares(watcher, crew) if spares else nullcontext():
            _conduct(watcher, partial(crew.start, watcher))
    if watcher.cause is not None:
        raise unpack(watcher.cause)
    results = crew.results()
    for rank in watcher.endings.keys() - results.keys() - {rank for rank, _ in watcher.lost} - set(places[0].late):
        raise PeerLost(rank, f"it left, but its result has not come: {watcher.endings[rank]}")
    return Launched([results.get(rank) for rank in range(len(places))], watcher.lost)


def _packed(program: object) -> bytes:
    try:
        return pickle.dumps(program)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise Refused(f"the program cannot be sent to other processes ({error}): {TOP_LEVEL}") from None


def run_script(
    script: str,
    arguments: Sequence[str],
    *,
    workers: int,
    servers: int = 0,
    link: str = "shm",
    bind: str = "127.0.0.1",
    deadline: float = 60.0,
) -> int:
    """Run a script once for each rank, and wait. The exit code says how it went, the log who was lost and why."""
    places = seats(workers, servers, link=link, bind=bind, deadline=deadline)
    watcher = Watcher(places[0])
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        _conduct(watcher, lambda: _start(ranks, [script, *arguments], places, watcher), patient=True)
    finally:
        for process in ranks:
            process.wait()
    return _verdict(watcher)


def _start(ranks: list[subprocess.Popen[bytes]], words: list[str], places: Sequence[Seat], watcher: Watcher) -> None:
    """Without an input: a process that is not in the foreground is stopped when it reads from the terminal."""
    common = {"OMP_NUM_THREADS": "1", **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    for seat in places:
        process = subprocess.Popen(
            [sys.executable, "-P", "-S", "-c", BEFORE_SCRIPT, str(os.getpid()), *words],
            env={**common, **seat.environment()},
            stdin=subprocess.DEVNULL,
            process_group=0,
        )
        ranks.append(process)
        watcher.watch(seat.rank, process.pid, process.poll)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
        return port


def _verdict(watcher: Watcher) -> int:
    """The exit code of whatever ended the run, else that of the first rank that ended badly."""
    facts, codes = watcher.cause, {rank: ending.code or 0 for rank, ending in watcher.endings.items()}
    if facts is not None:
        error = unpack(facts)
        if (facts.get("rank"), facts.get("why")) not in watcher.lost:  # that has been said already
            log.error("%s", error)
        own = codes.get(facts["rank"], 0) if facts["kind"] == "failed" else 0
        return own if own > 0 else exit_code(error)
    lost = {rank for rank, _ in watcher.lost}
    for rank, code in codes.items():
        if code and rank not in lost:
            how = f"exit code {code}" if code > 0 else watcher.endings[rank]
            log.error("rank %d failed after it had left: %s", rank, how)
            return code if code > 0 else 128 - code
    return 0


def _conduct(watcher: Watcher, start: Callable[[], None], *, patient: bool = False) -> None:
    """Start the ranks and wait until they have ended. Whatever happens, none is left."""
    with watcher, _finishing_on_sigterm(watcher):
        with _interrupts_held_back():  # nor is a thread's start to be broken off: nobody would know whether it runs
            watcher.start(patient=patient)
            start()
        watcher.wait()


@contextmanager
def _handling(number: signal.Signals, handler: Any) -> Iterator[None]:
    """Only the main thread may handle signals; elsewhere whoever owns it decides about them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Ctrl-C comes later. From processes started meanwhile it stays away: they are stopped by us, in order."""
    came: list[int] = []
    with _handling(signal.SIGINT, lambda number, _: came.append(number)):
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # which those processes inherit
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if came:
        signal.raise_signal(signal.SIGINT)


def _calling_spares(watcher: Watcher, crew: Crew) -> Any:
    return _handling(signal.SIGUSR1, lambda *_: watcher.events.post(partial(crew.start_spare, watcher)))


def _finishing_on_sigterm(watcher: Watcher) -> Any:
    return _handling(signal.SIGTERM, lambda *_: watcher.finish())
