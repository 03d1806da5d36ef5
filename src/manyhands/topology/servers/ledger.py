"""Ledger: where every worker stands at one shard, as plain integers.

Integers only, so that the same ledger can be a list in one process or lie in the shared memory of a
host. The slowest clock is kept, not searched: it is looked for again only when the last worker at it
moves on, which costs one comparison per push on average.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from itertools import islice
from typing import NamedTuple

from manyhands.core.protocols import Standing

NEVER = 2**62
"""The clock of a worker that has left: it holds nobody up."""

_VERSION, _SLOWEST, _AT_SLOWEST, _ALIVE, _BEGUN, _PENDING, _LEFT_BEHIND, _BATCHES = range(8)
_HEAD = 8
_ROWS = 6
_SLOT_ROWS = 3


class Pending(NamedTuple):
    """A gradient that has not been applied: whose it is, where it lies, the version it was computed at.

    It may be the sum of several; then its version is the oldest of theirs, and `terms` says how many they are.
    """

    worker: int
    slot: int
    seen: int
    terms: int = 1


class Ledger:
    """Clocks, versions and who waits, for `workers` workers numbered from 0.

    Args:
        workers: how many there are.
        counts: how many update counts to keep beside them.
        slots: how many gradients may be pending together; one of each worker, if not given.
        cells: memory for `Ledger.size(workers, counts, slots)` integers, all zero when new.
        late: which of them come later.
    """

    def __init__(
        self,
        workers: int,
        counts: int,
        slots: int | None = None,
        cells: MutableSequence[int] | None = None,
        late: Sequence[int] = (),
    ) -> None:
        slots = slots or workers
        fresh = cells is None
        cells = [0] * self.size(workers, counts, slots) if cells is None else cells
        rows = [cells[_HEAD + row * workers : _HEAD + (row + 1) * workers] for row in range(_ROWS)]
        after = _HEAD + _ROWS * workers
        self._head = cells[:_HEAD]
        self.clock, self.waiting, self.parked, self.lag, self.wanted, self.refused = rows
        rows = [cells[after + row * slots : after + (row + 1) * slots] for row in range(_SLOT_ROWS)]
        self._owner, self._seen, self._terms = rows
        self.counts = cells[after + _SLOT_ROWS * slots :]
        self.workers = workers
        self.slots = slots
        self._late = late
        if fresh:
            self.begin()

    @staticmethod
    def size(workers: int, counts: int, slots: int) -> int:
        """How many integers a ledger needs."""
        return _HEAD + _ROWS * workers + _SLOT_ROWS * slots + counts

    def begin(self) -> None:
        """Everyone is alive at clock 0; who comes later has left, in a way."""
        self._head[_AT_SLOWEST] = self._head[_ALIVE] = self.workers - len(self._late)
        for i in self._late:
            self.clock[i] = NEVER
        self._head[_BEGUN] = 1

    @property
    def begun(self) -> bool:
        """Whether somebody has begun this ledger."""
        return bool(self._head[_BEGUN])

    @property
    def version(self) -> int:
        """How many updates have been applied."""
        return self._head[_VERSION]

    @version.setter
    def version(self, value: int) -> None:
        self._head[_VERSION] = value

    @property
    def slowest(self) -> int:
        """The clock of the slowest worker still there."""
        return self._head[_SLOWEST]

    @property
    def alive(self) -> int:
        """How many workers have not left."""
        return self._head[_ALIVE]

    @property
    def expected(self) -> int:
        """How many gradients could be pending: one of everyone alive, and those left behind by the departed."""
        return self._head[_ALIVE] + self._head[_LEFT_BEHIND]

    @property
    def batches(self) -> int:
        """Of how many mini-batches gradients have come in."""
        return self._head[_BATCHES]

    @batches.setter
    def batches(self, value: int) -> None:
        self._head[_BATCHES] = value

    @property
    def pending(self) -> int:
        """How many gradients have not been applied."""
        return self._head[_PENDING]

    def add_pending(self, i: int, seen: int = 0, terms: int = 1) -> int:
        """A gradient of worker `i` has come in, computed at version `seen`; returns the slot it has from now on."""
        slot = 0
        while self._owner[slot]:
            slot += 1
        self._owner[slot], self._seen[slot], self._terms[slot] = i + 1, seen, terms
        self._head[_PENDING] += 1
        self.waiting[i] += 1
        return slot

    def all_pending(self) -> list[Pending]:
        """In the order of ranks, and of one rank in the order they came."""
        owned = ((owner, slot) for slot, owner in enumerate(self._owner) if owner)
        found = sorted(islice(owned, self.pending))  # they lie in the lowest slots, so this does not look far
        return [Pending(owner - 1, slot, self._seen[slot], self._terms[slot]) for owner, slot in found]

    def take(self, some: Sequence[Pending]) -> None:
        """These are applied, or dropped: from now on they are not pending."""
        for i, slot, *_ in some:
            self._owner[slot] = 0
            self.waiting[i] -= 1
            self._head[_LEFT_BEHIND] -= self.has_left(i)
        self._head[_PENDING] -= len(some)

    def has_left(self, i: int) -> bool:
        """Whether worker `i` is gone."""
        return self.clock[i] == NEVER

    def standing(self, i: int) -> Standing:
        """Where worker `i` stands."""
        return Standing(self.clock[i], self.slowest, self.version, bool(self.waiting[i]))

    def tick(self, i: int) -> bool:
        """Worker `i` has finished a clock; says whether the slowest clock moved."""
        return self._move(i, self.clock[i] + 1)

    def leave(self, i: int) -> bool:
        """Worker `i` is gone; says whether the slowest clock moved."""
        if self.has_left(i):
            return False
        self._head[_ALIVE] -= 1
        self._head[_LEFT_BEHIND] += self.waiting[i]
        self.parked[i] = 0
        return self._move(i, NEVER)

    def join(self, i: int) -> None:
        """Worker `i` is back, at the slowest clock; the first one begins at 0 again."""
        if not self.has_left(i):
            return
        if not self.alive:
            self._head[_SLOWEST] = self._head[_AT_SLOWEST] = 0
        self.clock[i] = self.slowest
        self._head[_AT_SLOWEST] += 1
        self._head[_ALIVE] += 1
        self._head[_LEFT_BEHIND] -= self.waiting[i]

    def _move(self, i: int, clock: int) -> bool:
        was_slowest = self.clock[i] == self.slowest
        self.clock[i] = clock
        if not was_slowest:
            return False
        self._head[_AT_SLOWEST] -= 1
        if self._head[_AT_SLOWEST]:
            return False
        slowest = min(self.clock)
        self._head[_SLOWEST] = slowest
        self._head[_AT_SLOWEST] = sum(1 for one in self.clock if one == slowest)
        return True
