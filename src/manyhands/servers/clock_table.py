"""ClockTable: the clocks of the workers at one shard, and their pending gradients, as plain integers.

Integers only, so that the same table can be a list in one process or lie in the shared memory of a host. The slowest
clock is stored: it is searched for only when the last worker at that clock advances, which costs one comparison per
push on average.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from typing import NamedTuple

from manyhands.core.consistency import WorkerClock
from manyhands.core.lag import NO_OUTCOMES, Outcomes

NEVER = 2**62
"""The clock of a worker that has left: it is never the slowest."""

_VERSION, _SLOWEST, _AT_SLOWEST, _ALIVE, _BEGUN, _PENDING, _LEFT_BEHIND, _BATCHES = range(8)
_HEAD = 8
_ROWS = 10
_SLOT_ROWS = 4


class Pending(NamedTuple):
    """A gradient that has not been applied: its worker, its slot, and the version that it was computed at.

    It may be the sum of several gradients: then `seen` is the oldest of their versions, and `terms` their number.
    `batches` is of how many mini-batches it is.
    """

    worker: int
    slot: int
    seen: int
    terms: int = 1
    batches: int = 1


class ClockTable:
    """Clocks, versions and parked readers, for `workers` workers numbered from 0.

    Args:
        workers: how many there are.
        counts: how many update counts to keep beside them.
        slots: how many gradients may be pending together; by default one of each worker.
        cells: memory for `ClockTable.size(workers, counts, slots)` integers, all zero when new.
        pending_ranks: the workers that join later.
    """

    def __init__(
        self,
        workers: int,
        counts: int,
        slots: int | None = None,
        cells: MutableSequence[int] | None = None,
        pending_ranks: Sequence[int] = (),
    ) -> None:
        slots = slots or workers
        fresh = cells is None
        cells = [0] * self.size(workers, counts, slots) if cells is None else cells
        rows = [cells[_HEAD + row * workers : _HEAD + (row + 1) * workers] for row in range(_ROWS)]
        after = _HEAD + _ROWS * workers
        self._head = cells[:_HEAD]
        self.clock, self.waiting, self.parked, self.ahead, self.wanted, *self._outcomes = rows
        rows = [cells[after + row * slots : after + (row + 1) * slots] for row in range(_SLOT_ROWS)]
        self._owner, self._seen, self._terms, self._batches = rows
        self.counts = cells[after + _SLOT_ROWS * slots :]
        self.workers = workers
        self.slots = slots
        self._pending_ranks = pending_ranks
        if fresh:
            self.begin()

    @staticmethod
    def size(workers: int, counts: int, slots: int) -> int:
        """How many integers a table needs."""
        return _HEAD + _ROWS * workers + _SLOT_ROWS * slots + counts

    def begin(self) -> None:
        """All workers are alive at clock 0, except those that join later: they count as having left."""
        self._head[_AT_SLOWEST] = self._head[_ALIVE] = self.workers - len(self._pending_ranks)
        for i in self._pending_ranks:
            self.clock[i] = NEVER
        self._head[_BEGUN] = 1

    @property
    def begun(self) -> bool:
        """Whether a rank has called `begin` on this memory."""
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
        """The clock of the slowest worker that has not left."""
        return self._head[_SLOWEST]

    @property
    def alive(self) -> int:
        """How many workers have not left."""
        return self._head[_ALIVE]

    @property
    def expected(self) -> int:
        """How many gradients could be pending: one of each worker alive, and those that departed workers left."""
        return self._head[_ALIVE] + self._head[_LEFT_BEHIND]

    @property
    def batches(self) -> int:
        """How many mini-batches have been consumed: those of the gradients that were applied or dropped."""
        return self._head[_BATCHES]

    @batches.setter
    def batches(self, value: int) -> None:
        self._head[_BATCHES] = value

    @property
    def pending(self) -> int:
        """How many gradients have not been applied."""
        return self._head[_PENDING]

    def add_pending(self, i: int, seen: int = 0, terms: int = 1, batches: int = 1) -> int:
        """Count a gradient of worker `i`, computed at version `seen`, as pending; returns its slot."""
        slot = 0
        while self._owner[slot]:
            slot += 1
        self._owner[slot], self._seen[slot] = i + 1, seen
        self._terms[slot], self._batches[slot] = terms, batches
        self._head[_PENDING] += 1
        self.waiting[i] += 1
        return slot

    def all_pending(self) -> list[Pending]:
        """The pending gradients in the order of ranks, those of one rank in the order of slots."""
        found: list[Pending] = []
        missing = self._head[_PENDING]
        for slot, owner in enumerate(self._owner):
            if not missing:  # the lowest slots are used first, so this loop is short
                break
            if owner:
                missing -= 1
                found.append(Pending(owner - 1, slot, self._seen[slot], self._terms[slot], self._batches[slot]))
        found.sort()
        return found

    def take(self, some: Sequence[Pending]) -> None:
        """These gradients are applied or dropped: they are no longer pending."""
        for i, slot, *_ in some:
            self._owner[slot] = 0
            self.waiting[i] -= 1
            if self.clock[i] == NEVER:
                self._head[_LEFT_BEHIND] -= 1
        self._head[_PENDING] -= len(some)

    def note_applied(self, some: Sequence[Pending]) -> None:
        """These gradients are part of the update that leads to the next version."""
        applied, lag_sum, lag_max, *_ = self._outcomes
        for one in some:
            i, lag = one.worker, self.version - one.seen
            applied[i] += 1
            lag_sum[i] += lag
            lag_max[i] = max(lag_max[i], lag)

    def note_dropped(self, i: int, seen: int) -> None:
        """A gradient of worker `i`, computed at version `seen`, is dropped."""
        *_, dropped, lag_sum = self._outcomes
        dropped[i] += 1
        lag_sum[i] += self.version - seen

    def take_outcomes(self, i: int) -> Outcomes:
        """What has become of the gradients of worker `i` since this was called last."""
        found = Outcomes(*[row[i] for row in self._outcomes])
        if found == NO_OUTCOMES:
            return NO_OUTCOMES
        for row in self._outcomes:
            row[i] = 0
        return found

    def has_left(self, i: int) -> bool:
        """Whether worker `i` has finished, is lost, or has not joined yet."""
        return self.clock[i] == NEVER

    def worker_clock(self, i: int) -> WorkerClock:
        """What a consistency asks of worker `i`."""
        head = self._head
        return WorkerClock(self.clock[i], head[_SLOWEST], head[_VERSION], bool(self.waiting[i]))

    def tick(self, i: int) -> bool:
        """Advance the clock of worker `i` by one; returns whether the slowest clock advanced."""
        clock = self.clock[i]
        self.clock[i] = clock + 1
        return clock == self._head[_SLOWEST] and self._leave_slowest()

    def leave(self, i: int) -> bool:
        """Worker `i` has left; returns whether the slowest clock advanced."""
        clock = self.clock[i]
        if clock == NEVER:
            return False
        self._head[_ALIVE] -= 1
        self._head[_LEFT_BEHIND] += self.waiting[i]
        self.parked[i] = 0
        self.clock[i] = NEVER
        return clock == self._head[_SLOWEST] and self._leave_slowest()

    def join(self, i: int) -> None:
        """Worker `i` joins at the slowest clock; if it is the only one, at clock 0."""
        if not self.has_left(i):
            return
        if not self.alive:
            self._head[_SLOWEST] = self._head[_AT_SLOWEST] = 0
        self.clock[i] = self.slowest
        self._head[_AT_SLOWEST] += 1
        self._head[_ALIVE] += 1
        self._head[_LEFT_BEHIND] -= self.waiting[i]

    def _leave_slowest(self) -> bool:
        """A worker is no longer at the slowest clock; if it was the last one there, find the new slowest clock."""
        self._head[_AT_SLOWEST] -= 1
        if self._head[_AT_SLOWEST]:
            return False
        clocks = list(self.clock)
        slowest = min(clocks)
        self._head[_SLOWEST] = slowest
        self._head[_AT_SLOWEST] = clocks.count(slowest)
        return True
