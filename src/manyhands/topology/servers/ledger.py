"""Ledger: where every worker stands at one shard, as plain integers.

Integers only, so that the same ledger can be a list in one process or lie in the shared memory of a
host. The slowest clock is kept, not searched: it is looked for again only when the last worker at it
moves on, which costs one comparison per push on average.
"""

from __future__ import annotations

from collections.abc import MutableSequence

from manyhands.core.protocols import Standing

NEVER = 2**62
"""The clock of a worker that has left: it holds nobody up."""

_VERSION, _SLOWEST, _AT_SLOWEST, _ALIVE, _BEGUN, _PENDING, _LEFT_BEHIND, _BATCHES = range(8)
_HEAD = 8
_ROWS = 6


class Ledger:
    """Clocks, versions and who waits, for `workers` workers numbered from 0.

    Args:
        workers: how many there are.
        counts: how many update counts to keep beside them.
        cells: memory for `Ledger.size(workers, counts)` integers, all zero when new.
    """

    def __init__(self, workers: int, counts: int, cells: MutableSequence[int] | None = None) -> None:
        fresh = cells is None
        cells = [0] * self.size(workers, counts) if cells is None else cells
        rows = [cells[_HEAD + row * workers : _HEAD + (row + 1) * workers] for row in range(_ROWS)]
        self._head = cells[:_HEAD]
        self.clock, self.waiting, self.parked, self.lag, self.seen, self._pending = rows
        self.counts = cells[_HEAD + _ROWS * workers :]
        self.workers = workers
        if fresh:
            self.begin()

    @staticmethod
    def size(workers: int, counts: int) -> int:
        """How many integers a ledger needs."""
        return _HEAD + _ROWS * workers + counts

    def begin(self) -> None:
        """Everyone is alive at clock 0."""
        self._head[_AT_SLOWEST] = self._head[_ALIVE] = self.workers
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

    def add_pending(self, i: int, seen: int = 0, batches: int = 1) -> None:
        """A gradient of worker `i` has come in, of so many mini-batches, computed at version `seen`."""
        self.seen[i] = seen
        self._pending[self.pending] = i
        self._head[_PENDING] += 1
        self._head[_BATCHES] += batches
        self.waiting[i] = 1

    def take_pending(self) -> list[int]:
        """Whose gradients are to be applied, in the order of ranks; from now on none is pending."""
        taken = sorted(self._pending[n] for n in range(self.pending))
        self._head[_PENDING] = self._head[_LEFT_BEHIND] = 0
        for i in taken:
            self.waiting[i] = 0
        return taken

    def standing(self, i: int) -> Standing:
        """Where worker `i` stands."""
        return Standing(self.clock[i], self.slowest, self.version, bool(self.waiting[i]))

    def tick(self, i: int) -> bool:
        """Worker `i` has finished a clock; says whether the slowest clock moved."""
        return self._move(i, self.clock[i] + 1)

    def leave(self, i: int) -> bool:
        """Worker `i` is gone; says whether the slowest clock moved."""
        if self.clock[i] == NEVER:
            return False
        self._head[_ALIVE] -= 1
        self._head[_LEFT_BEHIND] += self.waiting[i]
        self.parked[i] = 0
        return self._move(i, NEVER)

    def join(self, i: int) -> None:
        """Worker `i` is back, at the slowest clock; the first one begins at 0 again."""
        if self.clock[i] != NEVER:
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
