"""Portions: a large batch in small parts, and which replica computes which of them.

    a replica is free     a portion of its own samples, which it has; then one of the worker with most portions left
    none is left          a copy of a portion that is late; the first result counts
    a replica is lost     all its portions are assigned again, also those it has pushed: some pushes may be lost

A portion is late when it has been assigned for longer than twice the usual time. Copying every portion that is still
computed would keep all replicas busy with results that are about to arrive.

Decisions only: nothing here sends or waits.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from statistics import median

PATIENCE = 2.0
"""A portion is late after this many usual times."""
MOMENT = 1e-9
"""Seconds added to a wait, so that it ends after the given time."""


class Portions:
    """One pass over a batch.

    Args:
        owners: for every portion the worker that has its samples.
        usual: the usual seconds of a portion in the pass before, if there was one.
    """

    def __init__(self, owners: Sequence[int], usual: float = math.inf) -> None:
        self._owners = owners
        self.usual = usual
        self._left: dict[int, deque[int]] = {owner: deque() for owner in owners}
        for portion, owner in enumerate(owners):
            self._left[owner].append(portion)
        self._out: dict[int, dict[int, float]] = {}
        """For every portion that is being computed: by which replicas, since when."""
        self._pushed: dict[int, int] = {}
        """For every portion that has been computed: the replica that was first."""
        self._times: list[float] = []
        self.losses = [math.nan] * len(owners)

    @property
    def done(self) -> bool:
        """Whether all have been computed and pushed."""
        return len(self._pushed) == len(self._owners)

    def take(self, replica: int, now: float) -> int | None:
        """Assign a portion to a free replica; None if there is none for it."""
        portion = self._next(replica)
        if portion is None:
            portion = self._late(replica, now)
        if portion is not None:
            self._out.setdefault(portion, {})[replica] = now
        return portion

    def _next(self, replica: int) -> int | None:
        if mine := self._left.get(replica):
            return mine.popleft()
        most = max(self._left.values(), key=len)
        return most.pop() if most else None

    def _late(self, replica: int, now: float) -> int | None:
        """The late portion with the fewest copies that this replica does not compute already."""
        late = [portion for portion, who in self._out.items() if replica not in who and now >= self._due(who)]
        return min(late, key=lambda portion: len(self._out[portion]), default=None)

    def _due(self, who: dict[int, float]) -> float:
        """When a portion is late; each copy gets the same time again."""
        return max(who.values()) + PATIENCE * self.usual

    def patience(self, free: Iterable[int], now: float) -> float | None:
        """Seconds until one of these free replicas may get a copy; None if only a message can change that."""
        free = set(free)
        due = min((self._due(who) for who in self._out.values() if not free <= who.keys()), default=math.inf)
        return None if due == math.inf else max(due - now, MOMENT)

    def pushed(self, portion: int, replica: int, loss: float, now: float) -> None:
        """A replica has sent a portion's gradient to all vector servers; only the first result of a portion counts."""
        who = self._out.pop(portion, None)
        if who is not None:
            self._pushed[portion] = replica
            self.losses[portion] = loss
            self._times.append(now - who.get(replica, min(who.values())))
            self.usual = median(self._times)

    def lose(self, replica: int) -> None:
        """A replica is lost: assign its portions again, unless another replica computes them."""
        for portion, who in list(self._out.items()):
            who.pop(replica, None)
            if not who:
                del self._out[portion]
                self._left[self._owners[portion]].appendleft(portion)
        for portion in [portion for portion, who in self._pushed.items() if who == replica]:
            del self._pushed[portion]
            self._left[self._owners[portion]].appendleft(portion)
