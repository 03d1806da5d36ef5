"""Budgets of the virtual world: one counter for all, or an order prescribed by the cluster. Both are free."""

from __future__ import annotations

from manyhands.core.protocols import Tag, Transport
from manyhands.virtual.cluster import Cluster

_NOTHING = Tag("nothing")


class Common:
    """All workers draw from one number of mini-batches."""

    stopped = False

    def __init__(self, batches: int) -> None:
        self._left = batches

    def grant(self, transport: Transport) -> bool:
        """Whoever comes first is served first."""
        self._left -= 1
        return self._left >= 0


class Prescribed:
    """Each worker gets as many mini-batches as the order of events names it; in `turns` also only then."""

    stopped = False

    def __init__(self, cluster: Cluster) -> None:
        events = cluster.order if cluster.turns is None else cluster.turns
        self._end = len(events or ()) + 1
        self._waits = cluster.turns is not None
        self._turns: dict[int, list[int]] = {}
        for place, rank in enumerate(events or ()):
            self._turns.setdefault(rank, []).append(place)

    def grant(self, transport: Transport) -> bool:
        """Wait for this rank's next turn; after its last one wait for the end, since to finish is an event too."""
        turns = self._turns.get(transport.rank)
        turn = turns.pop(0) if turns else self._end
        if turn > transport.now() and (self._waits or turn == self._end):
            transport.recv(_NOTHING, frm=transport.rank, timeout=turn - transport.now())
        return turn < self._end
