"""Portions: a large batch in small pieces, and who computes which of them.

    a replica is free     its own samples first, which it has; then those of whoever has most left
    none is left          a copy of one that is late; the first to come counts
    a replica is lost     all it had goes to others, also what it has pushed: some of it may be lost on the way

Late means: out for longer than twice what portions usually take. Copying whatever is still out would keep everyone busy
with what is about to arrive. Decisions only: nothing here sends or waits.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from statistics import median

PATIENCE = 2.0
"""Usual times after which a portion is late."""
MOMENT = 1e-9
"""Seconds that make sure of being past a given time."""


class Portions:
    """One pass over a batch.

    Args:
        owners: for every portion the replica that has its samples.
        usual: seconds that a portion took in the pass before, if there was one.
    """

    def __init__(self, owners: Sequence[int], usual: float = math.inf) -> None:
        self._owners = owners
        self.usual = usual
        self._left: dict[int, deque[int]] = {owner: deque() for owner in owners}
        for portion, owner in enumerate(owners):
            self._left[owner].append(portion)
        self._out: dict[int, dict[int, float]] = {}
        """For every portion that somebody computes: who, since when."""
        self._pushed: dict[int, int] = {}
        """For every portion that has been computed: who did it first."""
        self._times: list[float] = []
        self.losses = [math.nan] * len(owners)

    @property
    def done(self) -> bool:
        """Whether all have been computed and pushed."""
        return len(self._pushed) == len(self._owners)

    def take(self, replica: int, now: float) -> int | None:
        """A portion for a free replica; None if there is nothing for it to do."""
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
        """The late portion with the fewest copies that this replica has not got."""
        late = [portion for portion, who in self._out.items() if replica not in who and now >= self._due(who)]
        return min(late, key=lambda portion: len(self._out[portion]), default=None)

    def _due(self, who: dict[int, float]) -> float:
        """When a portion is late; each copy gets as much time again."""
        return max(who.values()) + PATIENCE * self.usual

    def patience(self, free: Iterable[int], now: float) -> float | None:
        """Seconds until one of these free replicas may get a copy; None if only news can change anything."""
        free = set(free)
        due = min((self._due(who) for who in self._out.values() if not free <= who.keys()), default=math.inf)
        return None if due == math.inf else max(due - now, MOMENT)

    def pushed(self, portion: int, replica: int, loss: float, now: float) -> None:
        """A replica has sent a portion's gradient to all keepers; what comes second does not count."""
        who = self._out.pop(portion, None)
        if who is not None:
            self._pushed[portion] = replica
            self.losses[portion] = loss
            self._times.append(now - who.get(replica, min(who.values())))
            self.usual = median(self._times)

    def lose(self, replica: int) -> None:
        """A replica is gone: what nobody else computes must be given out again."""
        for portion, who in list(self._out.items()):
            who.pop(replica, None)
            if not who:
                del self._out[portion]
                self._left[self._owners[portion]].appendleft(portion)
        for portion in [portion for portion, who in self._pushed.items() if who == replica]:
            del self._pushed[portion]
            self._left[self._owners[portion]].appendleft(portion)
