"""Memory that the ranks of a host have in common, and locks that no dead rank can keep.

Regions belong to the job, not to a rank: whoever watches over the host makes them (with room reserved, so that a
shortage is an error and not a bus error) and hands them out as open files without a name. So nothing can be left
behind, and what a killed rank had shared is still there for the others.
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
"""Gives the open file of the region with this name and size."""


class Memory:
    """One rank's view of its host's regions.

    Args:
        ask: where regions come from.
        rank: whose; part of the names of its own regions.
    """

    def __init__(self, ask: Ask, rank: int) -> None:
        self._ask = ask
        self._rank = rank
        self._regions: dict[str, Tensor] = {}
        self._places: list[tuple[int, int, str]] = []
        self._shared: dict[str, Tensor] = {}
        self._made = 0
        self._busy = threading.RLock()

    def region(self, name: str, nbytes: int) -> Tensor:
        """The bytes of a region; it is mapped once."""
        memory = self._regions.get(name)
        if memory is None:
            with self._busy:
                memory = self._regions.get(name)
                if memory is None:
                    return self._map(name, nbytes)
        if memory.numel() != nbytes:
            raise ManyhandsError(f"the memory {name!r:.80} has {memory.numel()} bytes, not {nbytes}")
        return memory

    def _map(self, name: str, nbytes: int) -> Tensor:
        file = self._ask(name, nbytes)
        try:
            view = mmap.mmap(file, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        finally:
            os.close(file)
        memory = self._regions[name] = torch.frombuffer(view, dtype=torch.uint8)
        self._places = [*self._places, (memory.data_ptr(), memory.data_ptr() + nbytes, name)]
        return memory

    def fresh(self, nbytes: int) -> Tensor:
        """A new region of this rank's own."""
        with self._busy:
            self._made += 1
            return self.region(f"own/{self._rank}/{self._made}", max(64, nbytes))

    def slot(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Zeroed memory of this rank that others can read in place."""
        return self.fresh(numel * dtype.itemsize)[: numel * dtype.itemsize].view(dtype)

    def shared(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        """The one memory of this name."""
        memory = self._shared.get(name)
        if memory is None:
            nbytes = numel * dtype.itemsize
            memory = self.region(f"shared/{name}", max(64, nbytes))[:nbytes].view(dtype)
            self._shared[name] = memory
        if memory.numel() != numel or memory.dtype != dtype:
            raise ManyhandsError(f"shared memory {name!r} has {memory.numel()} {memory.dtype}, not {numel} {dtype}")
        return memory

    def find(self, x: Tensor) -> tuple[str, int, int] | None:
        """Where a contiguous tensor lies, if others can see it there: region, its size, offset."""
        start = x.data_ptr()
        for low, high, name in self._places:
            if low <= start < high:
                return name, high - low, start - low
        return None


class HostLock:
    """A mutex among all threads of all ranks of a host; the kernel frees it when its holder dies.

    Args:
        file: the same open file in every rank; what is locked is one byte of it, chosen by the name.
        waited: told how long it took to get in, if it took any time.
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
                    if error.errno != errno.EDEADLK:  # the kernel takes our threads for one: it may see a circle
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
    """A host's mutexes by name, made when they are first asked for."""

    def __init__(self, ask: Ask, waited: Callable[[float], None]) -> None:
        self._ask, self._waited = ask, waited
        self._file: int | None = None
        self._known: dict[str, HostLock] = {}
        self._busy = threading.Lock()

    def named(self, name: str) -> HostLock:
        """The same one for all threads."""
        found = self._known.get(name)
        if found is None:
            with self._busy:
                if self._file is None:
                    self._file = self._ask("locks", 64)
                found = self._known.setdefault(name, HostLock(self._file, name, self._waited))
        return found


class Buffers:
    """Stretches of bytes that are used again and again: by kind, at most as many as are out at one time.

    Whoever asks gets the smallest that is large enough. One is given up only for a larger one, never because another
    size is wanted now: memory of a host is not freed before the job ends.
    """

    def __init__(self, make: Callable[[int], Tensor]) -> None:
        self._make = make
        self._free: dict[tuple[int, str], list[Tensor]] = {}
        self._busy = threading.Lock()

    def take(self, kind: tuple[int, str], nbytes: int) -> Tensor:
        """At least `nbytes`."""
        with self._busy:
            free = self._free.setdefault(kind, [])
            place = bisect_left(free, nbytes, key=Tensor.numel)
            if place < len(free):
                return free.pop(place)
            if free:
                free.pop(0)
        return self._make(_roomy(nbytes))

    def give_back(self, kind: tuple[int, str], buffer: Tensor) -> None:
        """It can be used again."""
        with self._busy:
            insort(self._free[kind], buffer, key=Tensor.numel)


def _roomy(nbytes: int) -> int:
    """A little to spare, so that similar sizes share a buffer."""
    grain = max(4096, 1 << max(0, math.ceil(math.log2(max(1, nbytes))) - 3))
    return -(-nbytes // grain) * grain
