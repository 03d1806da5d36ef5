"""Shared memory of the ranks of a host, and locks that a dead rank cannot hold.

Regions belong to the job, not to a rank: the host's watcher creates them (with their pages allocated, so that a
shortage is an error and not a bus error) and hands them out as anonymous files. So nothing can be left behind, and what
a killed rank had shared is still available to the others.
"""

from __future__ import annotations

import errno
import fcntl
import math
import mmap
import os
import threading
import time
from bisect import bisect_left, insort
from collections.abc import Callable
from hashlib import blake2b
from types import TracebackType

import torch
from torch import Tensor

from manyhands.core.errors import ManyhandsError

Ask = Callable[[str, int], int]
"""Gives the file descriptor of the region with this name and size."""


class Memory:
    """One rank's view of its host's regions.

    Args:
        ask: requests a region from the watcher.
        rank: part of the names of its own regions.
    """

    def __init__(self, ask: Ask, rank: int) -> None:
        self._ask = ask
        self._rank = rank
        self._regions: dict[str, Tensor] = {}
        self._mapped: list[tuple[int, int, str]] = []
        self._shared: dict[str, Tensor] = {}
        self._made = 0
        self._lock = threading.RLock()

    def region(self, name: str, nbytes: int) -> Tensor:
        """The bytes of a region, which is mapped at the first call."""
        memory = self._regions.get(name)
        if memory is None:
            with self._lock:
                memory = self._regions.get(name)
                if memory is None:
                    return self._map(name, nbytes)
        if memory.numel() != nbytes:
            raise ManyhandsError(
                f"the shared memory {name!r:.80} has {memory.numel()} bytes, but {nbytes} were requested"
            )
        return memory

    def _map(self, name: str, nbytes: int) -> Tensor:
        file = self._ask(name, nbytes)
        try:
            view = mmap.mmap(file, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        finally:
            os.close(file)
        memory = self._regions[name] = torch.frombuffer(view, dtype=torch.uint8)
        self._mapped = [*self._mapped, (memory.data_ptr(), memory.data_ptr() + nbytes, name)]
        return memory

    def fresh(self, nbytes: int) -> Tensor:
        """A new region of this rank's own."""
        with self._lock:
            self._made += 1
            return self.region(f"own/{self._rank}/{self._made}", max(64, nbytes))

    def slot(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Zeroed memory of this rank that others can read in place."""
        return self.fresh(numel * dtype.itemsize)[: numel * dtype.itemsize].view(dtype)

    def shared(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        """Zeroed memory that all ranks of the host share under this name."""
        memory = self._shared.get(name)
        if memory is None:
            nbytes = numel * dtype.itemsize
            memory = self.region(f"shared/{name}", max(64, nbytes))[:nbytes].view(dtype)
            self._shared[name] = memory
        if memory.numel() != numel or memory.dtype != dtype:
            raise ManyhandsError(f"shared memory {name!r} has {memory.numel()} {memory.dtype}, not {numel} {dtype}")
        return memory

    def find(self, x: Tensor) -> tuple[str, int, int] | None:
        """Where a contiguous tensor lies in shared memory: region, its size, offset; None if it does not."""
        start = x.data_ptr()
        for low, high, name in self._mapped:
            if low <= start < high:
                return name, high - low, start - low
        return None


class HostLock:
    """A mutex among all threads of all ranks of a host; the kernel frees it when its holder dies.

    Args:
        file: the same open file in every rank; what is locked is one byte of it, chosen by the name.
        waited: called with the seconds that an acquisition had to wait.
    """

    def __init__(self, file: int, name: str, waited: Callable[[float], None]) -> None:
        self._file = file
        self._byte = int.from_bytes(blake2b(name.encode(), digest_size=5).digest())
        self._threads = threading.Lock()
        self._waited = waited

    def __enter__(self) -> None:
        self._threads.acquire()
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self._byte)
        except OSError:
            self._wait()

    def _wait(self) -> None:
        began = time.monotonic()
        try:
            while True:
                try:
                    fcntl.lockf(self._file, fcntl.LOCK_EX, 1, self._byte)
                    break
                except OSError as error:
                    if (
                        error.errno != errno.EDEADLK
                    ):  # the kernel counts all our threads as one owner, and may see a false deadlock
                        raise
                    time.sleep(1e-4)
        except BaseException:
            self._threads.release()
            raise
        self._waited(time.monotonic() - began)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, self._byte)
        self._threads.release()


class HostLocks:
    """A host's mutexes by name, created at the first request."""

    def __init__(self, ask: Ask, waited: Callable[[float], None]) -> None:
        self._ask, self._waited = ask, waited
        self._file: int | None = None
        self._known: dict[str, HostLock] = {}
        self._lock = threading.Lock()

    def named(self, name: str) -> HostLock:
        """The mutex of this name, one object for all threads."""
        found = self._known.get(name)
        if found is None:
            with self._lock:
                if self._file is None:
                    self._file = self._ask("locks", 64)
                found = self._known.setdefault(name, HostLock(self._file, name, self._waited))
        return found

    def close(self) -> None:
        """Close the file of the mutexes, none of which may be in use."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


class Buffers:
    """Byte buffers that are reused: of each kind at most as many as are in use at the same time.

    A request gets the smallest free buffer that is large enough. A free buffer is dropped only when a larger one
    replaces it, never because another size is requested: shared memory is not freed before the job ends.
    """

    def __init__(self, make: Callable[[int], Tensor]) -> None:
        self._make = make
        self._free: dict[tuple[int, str], list[Tensor]] = {}
        self._lock = threading.Lock()

    def take(self, kind: tuple[int, str], nbytes: int) -> Tensor:
        """A buffer of at least `nbytes`."""
        with self._lock:
            free = self._free.setdefault(kind, [])
            index = bisect_left(free, nbytes, key=Tensor.numel)
            if index < len(free):
                return free.pop(index)
            if free:
                free.pop(0)
        return self._make(_rounded_up(nbytes))

    def give_back(self, kind: tuple[int, str], buffer: Tensor) -> None:
        """Return a buffer, so that later requests can use it."""
        with self._lock:
            insort(self._free[kind], buffer, key=Tensor.numel)


def _rounded_up(nbytes: int) -> int:
    """Round up to one of eight sizes per power of two, so that similar sizes share a buffer."""
    grain = max(4096, 1 << max(0, math.ceil(math.log2(max(1, nbytes))) - 3))
    return -(-nbytes // grain) * grain
