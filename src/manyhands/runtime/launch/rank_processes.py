"""The processes of a launched job, and their results."""

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

from manyhands.runtime.launch import rank_main
from manyhands.runtime.launch.program import without_imaginary_main
from manyhands.runtime.membership.watcher import Watcher
from manyhands.runtime.rank_spec import RankSpec

if TYPE_CHECKING:
    from multiprocessing.context import SpawnContext

Context = Literal["spawn", "forkserver"]
"""How processes are started: never by fork, which hangs after the parent has run a backward pass."""
INTERVAL = 0.1
"""Seconds between two checks whether all processes have ended."""


class RankProcesses:
    """One process for each rank, all running the same pickled program."""

    def __init__(self, rank_specs: Sequence[RankSpec], program: bytes, context: Context) -> None:
        self._specs = rank_specs
        self._program = program
        self._context = cast("SpawnContext", multiprocessing.get_context(context))
        self._spares = iter([spec for spec in rank_specs if spec.rank in spec.pending_ranks])
        self._processes: list[BaseProcess] = []
        self._pipes: dict[Connection, int] = {}
        self._returned: dict[int, bytes] = {}
        self._ended = threading.Event()
        resource_tracker.ensure_running()  # started later, it would unblock signals that must stay blocked then
        self._collector = threading.Thread(target=self._collect, name="manyhands-results", daemon=True)

    def start(self, watcher: Watcher) -> None:
        """Start all ranks but the spares; `watcher` monitors each from its start."""
        for spec in self._specs:
            if spec.rank not in spec.pending_ranks:
                self._start(spec, watcher)
        self._collector.start()

    def start_spare(self, watcher: Watcher) -> None:
        """Start the next spare, if there is one left."""
        spec = next(self._spares, None)
        if spec is not None:
            self._start(spec, watcher)

    def _start(self, spec: RankSpec, watcher: Watcher) -> None:
        ours, theirs = self._context.Pipe(duplex=False)
        with theirs, without_imaginary_main():
            process = self._context.Process(target=rank_main.main, args=(spec, self._program, theirs))
            process.start()
        self._processes.append(process)
        self._pipes[ours] = spec.rank
        assert process.pid is not None
        watcher.watch(spec.rank, process.pid, partial(_exit_code, process))

    def close(self) -> None:
        """Reap the processes, which have ended, and read the results that are still in the pipes."""
        for process in self._processes:
            process.join()
            process.close()
        self._ended.set()
        if self._collector.ident is not None:
            self._collector.join()
        for pipe in self._pipes:
            pipe.close()

    def results(self) -> dict[int, Any]:
        """The results by rank; ranks that returned nothing are missing."""
        return {rank: pickle.loads(data) for rank, data in self._returned.items()}

    def _collect(self) -> None:
        """Read results while ranks run: a rank with a large one cannot exit before it is read."""
        read: set[Connection] = set()
        while True:
            ready = wait(set(self._pipes) - read, INTERVAL)
            if not ready and self._ended.is_set():  # a child of a rank may keep its pipe open
                return
            for pipe in ready:
                assert isinstance(pipe, Connection)
                read.add(pipe)
                with suppress(EOFError, OSError):  # it ended without a result
                    self._returned[self._pipes[pipe]] = pipe.recv_bytes()


def _exit_code(process: BaseProcess) -> int | None:
    process.join(1.0)
    return process.exitcode
