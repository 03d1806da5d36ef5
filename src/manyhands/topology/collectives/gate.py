"""Gate: the workers of one host wait for each other, many times a second.

A message wakes two threads, which takes some tenths of a millisecond. Workers in lock step mostly come within less of
each other, so they first look for the others in common memory, and go to sleep only if somebody takes longer:

    here       arrived[me] <- n;  whoever sleeps for me is told, by a message
    for each   look for a moment: arrived[other] >= n?      else sleep until it tells

If there are more workers than cores, nobody looks: it would take the core of whom it looks for. Ranks may see different
cores, so each decides that for itself; the gate is the same. In virtual time, and without the compiled kernels, all are
told by messages.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from ctypes import c_int32, c_int64, c_void_p
from typing import Protocol, runtime_checkable

import torch

from manyhands.core.native import compiled
from manyhands.core.protocols import Tag, Transport, recv
from manyhands.topology.collectives.group import Group

WAKE = Tag("gate", credit=64, carries="nothing")
CELLS = 16
"""Integers of each place: two lines of a cache, so that nobody writes where another looks."""
PATIENCE = 300_000
"""Nanoseconds of looking: about what it takes to be woken."""

Kernel = Callable[..., int]


@runtime_checkable
class NotesWaits(Protocol):
    """A transport that can be told of waiting that it has not seen."""

    def note_wait(self, seconds: float) -> None:
        """The current activity has waited for others."""


def gate(
    transport: Transport, ranks: Sequence[int], name: str, by_messages: Callable[[], None] | None = None
) -> Callable[[], None]:
    """How these ranks, all of one host, wait for each other; by messages in a way of their own, if they have one."""
    found = kernels()
    if found is None or not isinstance(transport, NotesWaits):
        return by_messages or Group(transport, ranks, name).meet
    return Gate(transport, transport.note_wait, ranks, name, *found).meet


def kernels() -> tuple[Kernel, Kernel] | None:
    """`arrive` and `await`, if they were compiled."""
    arrive = compiled("manyhands_arrive", c_int64, c_void_p, c_int64, c_int64, c_int64, c_void_p)
    find = compiled("manyhands_await", c_int32, c_void_p, c_int64, c_int64, c_int64, c_int64, c_int64)
    return None if arrive is None or find is None else (arrive, find)


class Gate:
    """One worker's side of it; each calls `meet` as often as the others."""

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
        self._memory = transport.shared(f"{name}.gate", CELLS * len(ranks), torch.int64)
        self._sleepers = torch.zeros(len(ranks), dtype=torch.int64)
        self._tag = Tag(f"{WAKE.name}:{name}", credit=WAKE.credit, carries=WAKE.carries)
        self._cells = memoryview(self._memory.numpy())  # type: ignore[arg-type]
        self._patience = PATIENCE if len(ranks) <= len(os.sched_getaffinity(0)) else 0

    def meet(self) -> None:
        """Wait until everyone is here; whoever else of this rank goes through the same gate is counted too."""
        number, places, cells = self._cells[CELLS * self._me] + 1, len(self._ranks), self._memory.data_ptr()
        told = self._arrive(cells, self._me, places, number, self._sleepers.data_ptr())
        for place in self._sleepers[:told].tolist() if told else ():
            self._t.send(self._ranks[place], self._tag)
        for place in range(places):
            if place != self._me:
                began = time.monotonic()
                found = self._find(cells, self._me, place, places, number, self._patience)
                self._note_wait(time.monotonic() - began)
                if not found:
                    recv(self._t, self._tag, frm=self._ranks[place])
