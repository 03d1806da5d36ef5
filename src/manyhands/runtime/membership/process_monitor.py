"""Monitors processes and reports how each ended. A stopped process is killed first: it must not continue later.

Children of this process are awaited with `waitid`, which reports a stop within a fraction of a millisecond. Others
(started by a fork server or by torchrun) are polled twenty times a second.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

INTERVAL_MS = 50
"""Milliseconds between two polls of processes that are not our children."""


@dataclass(frozen=True)
class Ending:
    """How a process ended: its exit code (minus the signal that killed it) if known, and the signal that stopped it."""

    code: int | None
    stopped: str = ""

    def __str__(self) -> str:
        if self.stopped:
            return f"it was stopped ({self.stopped}) and has been killed"
        if self.code is None:
            return "it died"
        if self.code < 0:
            return f"it was killed by {_name(-self.code)}"
        return f"it exited without leaving the run (exit code {self.code})"


@dataclass
class _Watched:
    rank: int
    pid: int
    pidfd: int
    exit_code: Callable[[], int | None]
    stopped: str = ""

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def is_stopped(self) -> bool:
        """Whether a signal has stopped it; a debugger's stop does not count, just as for children."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_bytes()
        except OSError:
            return False
        return stat.rpartition(b")")[2].split()[0] == b"T"


class ProcessMonitor:
    """Calls `report(rank, ending)` from its own threads, once for each process."""

    def __init__(self, report: Callable[[int, Ending], None]) -> None:
        self._report = report
        self._watched: dict[int, _Watched] = {}
        self._others: list[_Watched] = []
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closing = False

    def watch(self, rank: int, pid: int, exit_code: Callable[[], int | None] = lambda: None) -> None:
        """Monitor this process; `exit_code` gives the exit code of one that is not our child."""
        try:
            watched = _Watched(rank, pid, os.pidfd_open(pid), exit_code)
        except ProcessLookupError:
            self._report(rank, Ending(exit_code()))
            return
        self._watched[rank] = watched
        try:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            self._poll_other(watched)
        else:
            self._start(lambda: self._wait_for_child(watched))

    def kill(self, ranks: Collection[int] | None = None) -> None:
        """Kill the processes of these ranks, or all that are left."""
        for rank, watched in list(self._watched.items()):
            if ranks is None or rank in ranks:
                watched.kill()

    def close(self) -> None:
        """End all threads; children must have ended."""
        self._closing = True
        for thread in self._threads:
            thread.join()
        for watched in self._watched.values():
            os.close(watched.pidfd)
        self._watched.clear()

    def _start(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name="manyhands-monitor", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _wait_for_child(self, child: _Watched) -> None:
        """The child remains a zombie: its owner reaps it."""
        events = os.WEXITED | os.WSTOPPED | os.WNOWAIT
        try:
            while (seen := os.waitid(os.P_PID, child.pid, events)) and seen.si_code in (os.CLD_STOPPED, os.CLD_TRAPPED):
                child.stopped, events = _name(seen.si_status), os.WEXITED | os.WNOWAIT
                child.kill()
            assert seen is not None
            code = seen.si_status if seen.si_code == os.CLD_EXITED else -seen.si_status
            self._report(child.rank, Ending(code, child.stopped))
        except ChildProcessError:  # other code of this process has reaped it
            self._report(child.rank, Ending(child.exit_code(), child.stopped))

    def _poll_other(self, other: _Watched) -> None:
        with self._lock:
            self._others.append(other)
            first = len(self._others) == 1
        if first:
            self._start(self._poll)

    def _poll(self) -> None:
        """The one thread for all processes that are not our children."""
        while not self._closing:
            with self._lock:
                others = {other.pidfd: other for other in self._others}
            poll = select.poll()
            for pidfd in others:
                poll.register(pidfd, select.POLLIN)
            dead = [others.pop(pidfd) for pidfd, _ in poll.poll(INTERVAL_MS)]
            for other in others.values():
                if not other.stopped and other.is_stopped():
                    other.stopped = "SIGSTOP"
                    other.kill()
            for other in dead:
                with self._lock:
                    self._others.remove(other)
                self._report(other.rank, Ending(other.exit_code(), other.stopped))


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
