"""Crew: the processes of a launched job, and what they return."""

from __future__ import annotations

import multiprocessing
import pickle
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any, Literal, cast

from manyhands.runtime import rank
from manyhands.runtime.seat import Seat
from manyhands.runtime.watch import Watcher

if TYPE_CHECKING:
    from multiprocessing.context import SpawnContext

Context = Literal["spawn", "forkserver"]
"""How processes are made: never by fork, which hangs after the parent has run a backward pass."""
INTERVAL = 0.1
"""How often it is looked whether more results can come."""


class Crew:
    """One process for each seat, all running the same pickled program."""

    def __init__(self, seats: Sequence[Seat], program: bytes, context: Context) -> None:
        self._seats = seats
        self._program = program
        self._context = cast("SpawnContext", multiprocessing.get_context(context))
        self._spares = iter([seat for seat in seats if seat.rank in seat.late])
        self._processes: list[BaseProcess] = []
        self._pipes: dict[Connection, int] = {}
        self._returned: dict[int, bytes] = {}
        self._ended = threading.Event()
        resource_tracker.ensure_running()  # begun later, it would let signals through that are held back then
        self._collector = threading.Thread(target=self._collect, name="manyhands-results", daemon=True)

    def start(self, watcher: Watcher) -> None:
        """Start all but the spares; `watcher` looks after each from its first moment."""
        for seat in self._seats:
            if seat.rank not in seat.late:
                self._start(seat, watcher)
        self._collector.start()

    def start_spare(self, watcher: Watcher) -> None:
        """Start one more, if there is one left."""
        seat = next(self._spares, None)
        if seat is not None:
            self._start(seat, watcher)

    def _start(self, seat: Seat, watcher: Watcher) -> None:
        ours, theirs = self._context.Pipe(duplex=False)
        with theirs:
            process = self._context.Process(target=rank.main, args=(seat, self._program, theirs))
            process.start()
        self._processes.append(process)
        self._pipes[ours] = seat.rank
        assert process.pid is not None
        watcher.watch(seat.rank, process.pid, partial(_exit_code, process))

    def close(self) -> None:
        """Reap them; they have ended. What they had returned before is in the pipes."""
        for process in self._processes:
            process.join()
            process.close()
        self._ended.set()
        if self._collector.ident is not None:
            self._collector.join()
        for pipe in self._pipes:
            pipe.close()

    def results(self) -> dict[int, Any]:
        """What came back, by rank."""
        return {rank: pickle.loads(data) for rank, data in self._returned.items()}

    def _collect(self) -> None:
        """A rank with much to return cannot end before that is read."""
        read: set[Connection] = set()
        while True:
            ready = wait(set(self._pipes) - read, INTERVAL)
            if not ready and self._ended.is_set():  # a child of a rank may hold its pipe open
                return
            for pipe in ready:
                assert isinstance(pipe, Connection)
                read.add(pipe)
                with suppress(EOFError, OSError):  # it had nothing to return
                    self._returned[self._pipes[pipe]] = pipe.recv_bytes()


def _exit_code(process: BaseProcess) -> int | None:
    process.join(1.0)
    return process.exitcode
