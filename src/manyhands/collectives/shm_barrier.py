"""A barrier of the workers of one host, in memory that all of them see, for many calls per second.

A message wakes two threads, which takes some tenths of a millisecond. Workers in lock step mostly arrive within less
time of each other, so a rank first polls the memory, and sleeps only if another rank takes longer:

    arrive      arrived[me] <- n;  a message wakes each rank that sleeps until this one arrives
    for each    poll for a short time: arrived[other] >= n?      else sleep until its message

If there are more workers than cores, a rank does not poll: it would occupy the core of the rank it waits for. Ranks may
see different numbers of cores, so each decides this for itself, and the barrier is the same. In virtual time, and
without the compiled kernels, the barrier is by messages only.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from ctypes import c_int32, c_int64, c_void_p
from typing import Protocol, runtime_checkable

import torch

from manyhands.core.kernels import compiled
from manyhands.core.port import Tag, Transport, recv

WAKE = Tag("shm-barrier", credit=64, carries="nothing")
CELLS = 16
"""Integers of each rank: two lines of a cache, so that no rank writes to a line that another polls."""
PATIENCE = 300_000
"""Nanoseconds of polling: about the time that it takes to be woken."""

Kernel = Callable[..., int]


@runtime_checkable
class NotesWaits(Protocol):
    """A transport that counts waiting which did not happen inside it."""

    def note_wait(self, seconds: float) -> None:
        """Count that the current activity has waited for others."""


def shm_barrier(
    transport: Transport, ranks: Sequence[int], name: str, by_messages: Callable[[], None]
) -> Callable[[], None]:
    """A barrier of these ranks, all of one host, in memory if that is possible, else the one given."""
    found = kernels()
    if found is None or not isinstance(transport, NotesWaits):
        return by_messages
    return SharedMemoryBarrier(transport, transport.note_wait, ranks, name, *found).barrier


def kernels() -> tuple[Kernel, Kernel] | None:
    """`arrive` and `await`, if they were compiled."""
    arrive = compiled("manyhands_arrive", c_int64, c_void_p, c_int64, c_int64, c_int64, c_void_p)
    find = compiled("manyhands_await", c_int32, c_void_p, c_int64, c_int64, c_int64, c_int64, c_int64)
    return None if arrive is None or find is None else (arrive, find)


class SharedMemoryBarrier:
    """One rank's view of the barrier; all ranks call `barrier` equally often."""

    def __init__(
        self,
        transport: Transport,
        note_wait: Callable[[float], None],
        ranks: Sequence[int],
        name: str,
        arrive: Kernel,
        find: Kernel,
    ) -> None:
        self._t, self._note_wait = transport, note_wait
        self._ranks = ranks
        self._me = ranks.index(transport.rank)
        self._arrive, self._find = arrive, find
        self._memory = transport.shared(f"{name}.barrier", CELLS * len(ranks), torch.int64)
        self._sleepers = torch.zeros(len(ranks), dtype=torch.int64)
        self._tag = Tag(f"{WAKE.name}:{name}", credit=WAKE.credit, carries=WAKE.carries)
        self._cells = memoryview(self._memory.numpy())  # type: ignore[arg-type]
        self._patience = PATIENCE if len(ranks) <= len(os.sched_getaffinity(0)) else 0

    def barrier(self) -> None:
        """Wait until all ranks have called this; objects of one rank that share the name count together."""
        number, size, cells = self._cells[CELLS * self._me] + 1, len(self._ranks), self._memory.data_ptr()
        asleep = self._arrive(cells, self._me, size, number, self._sleepers.data_ptr())
        for index in self._sleepers[:asleep].tolist() if asleep else ():
            self._t.send(self._ranks[index], self._tag)
        for index in range(size):
            if index != self._me:
                began = time.monotonic()
                found = self._find(cells, self._me, index, size, number, self._patience)
                self._note_wait(time.monotonic() - began)
                if not found:
                    recv(self._t, self._tag, frm=self._ranks[index])
