"""The processes of one side of a benchmark, and how the coordinator controls them.

Each rank is a fresh process with one thread for torch and the variables that torchrun would set. A socket connects it
to the coordinator: a number means "do this many steps", the answer is the seconds they took, and the end of the stream
means stop. So ranks exit when the coordinator dies.
"""

from __future__ import annotations

import inspect
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from _hosts import CABLE, Hosts

from manyhands.core.errors import ManyhandsError

RANKS = 2
REPORT_DEADLINE = 180.0
"""Seconds after which a side without a report counts as hung; the first block includes its start."""
END_DEADLINE = 20.0
SHOWN_LINES = 30
"""The lines that are shown of the output of a rank that failed."""


class Commands:
    """The commands of the coordinator to a rank, and its reports."""

    def __init__(self, end: socket.socket) -> None:
        self._stream = end.makefile("rw", encoding="ascii")

    def wait(self) -> int | None:
        """The number of steps to run now; None: stop."""
        line = self._stream.readline()
        return int(line) if line else None

    def report(self, seconds: float) -> None:
        """Report the seconds of the last steps."""
        self._stream.write(f"{seconds!r}\n")
        self._stream.flush()

    def repeat(self, step: Callable[[], object]) -> None:
        """Run, time and report `step` as often as the coordinator asks, until it closes the socket."""
        while (steps := self.wait()) is not None:
            began = time.perf_counter()
            for _ in range(steps):
                step()
            self.report(time.perf_counter() - began)


@dataclass(frozen=True)
class Side:
    """One of the compared implementations: every rank runs `function(*words, commands)`, loaded by file and name.

    All ranks are on this host, or rank r on host r of `hosts`.
    """

    name: str
    function: Callable[..., None]
    words: tuple[str, ...] = ()
    ranks: int = RANKS
    hosts: Hosts | None = None


class Rank:
    """One process of a side, seen from the coordinator."""

    def __init__(self, side: Side, rank: int, port: int) -> None:
        self.name = f"{side.name}, rank {rank}"
        self.socket, theirs = socket.socketpair()
        self.output = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        file = str(inspect.getsourcefile(side.function))
        program = Path(__file__).with_name("_rank.py")
        inside = [] if side.hosts is None else side.hosts.inside(rank)
        with theirs:
            self.process = subprocess.Popen(
                [*inside, sys.executable, program, str(theirs.fileno()), file, side.function.__name__, *side.words],
                env={**os.environ, **environment(rank, port, side.ranks, side.hosts)},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self.output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # an interrupt from the keyboard reaches the coordinator only
            )
        self._reports = self.socket.makefile("r", encoding="ascii")

    def fileno(self) -> int:
        """The descriptor that `select` waits for."""
        return self.socket.fileno()

    def start(self, steps: int) -> None:
        """Start so many steps; if the rank is dead, its report will be missing."""
        with suppress(OSError):
            self.socket.sendall(f"{steps}\n".encode())

    def seconds(self) -> float | None:
        """The seconds it reports; None if it has ended instead."""
        try:
            line = self._reports.readline()
        except OSError:
            return None
        return float(line) if line else None

    def exit_report(self) -> str:
        """Its exit code and the end of its output."""
        self.output.seek(0)
        lines = self.output.read().rstrip().splitlines()[-SHOWN_LINES:]
        return "\n".join([f"[{self.name}: exit code {self.process.poll()}]", *lines])

    def stop(self) -> None:
        """Close its commands, so that it exits."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def ended_well(self) -> bool:
        """Whether it ends in time, with exit code 0."""
        with suppress(subprocess.TimeoutExpired):
            return self.process.wait(END_DEADLINE) == 0
        return False

    def kill(self) -> None:
        """Kill it and all processes it has started, and close everything."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for handle in (self._reports, self.socket, self.output):
            handle.close()


class Pair:
    """All ranks of one side. Leaving the `with` block ends them, whatever happened in it."""

    def __init__(self, side: Side, port: int) -> None:
        self.side, self.port = side, port
        self.ranks: list[Rank] = []
        self._started = ExitStack()

    def __enter__(self) -> Pair:
        with ExitStack() as started:
            for rank in range(self.side.ranks):
                self.ranks.append(Rank(self.side, rank, self.port))
                started.callback(self.ranks[-1].kill)
            self._started = started.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._started:
            if error is None:
                for rank in self.ranks:
                    rank.stop()
                if not all([rank.ended_well() for rank in self.ranks]):
                    raise self.failed("did not end well")

    def run(self, steps: int) -> float:
        """Let all ranks do `steps` steps; the seconds of the slowest."""
        for rank in self.ranks:
            rank.start(steps)
        waiting, slowest = list(self.ranks), 0.0
        while waiting:
            ready = select.select(waiting, [], [], REPORT_DEADLINE)[0]
            if not ready:
                raise self.failed(f"has not reported for {REPORT_DEADLINE:.0f} s")
            for rank in ready:
                seconds = rank.seconds()
                if seconds is None:
                    rank.ended_well()
                    raise self.failed("has failed")
                slowest = max(slowest, seconds)
                waiting.remove(rank)
        return slowest

    def failed(self, what: str) -> ManyhandsError:
        """The error of this side, with the end of its ranks' output."""
        return ManyhandsError(
            "\n".join([f"the side {self.side.name!r} {what}", *(r.exit_report() for r in self.ranks)])
        )


def environment(rank: int, port: int, ranks: int = RANKS, hosts: Hosts | None = None) -> dict[str, str]:
    """The environment of a rank, with torchrun's variables."""
    alone = hosts is not None
    cable = {} if hosts is None else {"GLOO_SOCKET_IFNAME": CABLE, "MANYHANDS_BIND": hosts.address(rank)}
    return {
        **one_thread(),
        **cable,
        "MASTER_ADDR": "127.0.0.1" if hosts is None else hosts.address(0),
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": "0" if alone else str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": "1" if alone else str(ranks),
    }


def one_thread() -> dict[str, str]:
    """One thread per process, and gloo on loopback only."""
    return {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def free_ports(count: int) -> list[int]:
    """Free ports, all different because all stay open until the last is found."""
    with ExitStack() as open_ports:
        return [open_ports.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(count)]
