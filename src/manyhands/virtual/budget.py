"""Budgets of the virtual world: one counter for all, or an order prescribed by the cluster. Neither costs time."""

from __future__ import annotations

from collections.abc import Sequence

from manyhands.core.budget import await_arrivals, pause
from manyhands.core.port import Transport
from manyhands.virtual.cluster import Cluster


class VirtualSharedBudget:
    """All workers draw from one number of mini-batches."""

    stopped = False

    def __init__(self, batches: int) -> None:
        self._total = batches
        self._taken = 0
        self.arrivals: Sequence[int] = ()
        self._joining: set[int] = set()

    def grant(self, transport: Transport) -> bool:
        """Whether one more is left; requests are served in the order of their arrival."""
        if self._taken < self._total:
            self._taken += 1
            return True
        await_arrivals(transport, lambda: self._joining)
        return False

    def enter(self, transport: Transport) -> int | None:
        """Begin to join: how many were granted, once there is one; None if the budget is used up."""
        while not self._taken and transport.peers("worker"):
            pause(transport)
        if not 0 < self._taken < self._total:
            return None
        self.arrivals = [*self.arrivals, transport.rank]
        self._joining.add(transport.rank)
        return self._taken

    def arrived(self, transport: Transport) -> None:
        """This rank has finished joining."""
        self._joining.remove(transport.rank)


class Prescribed:
    """Each worker gets one mini-batch for each of its events in the prescribed order, with `turns` at that time."""

    stopped = False
    arrivals: Sequence[int] = ()

    def __init__(self, cluster: Cluster) -> None:
        events = cluster.order if cluster.turns is None else cluster.turns
        self._end = len(events or ()) + 1
        self._waits = cluster.turns is not None
        self._turns: dict[int, list[int]] = {}
        for turn, rank in enumerate(events or ()):
            self._turns.setdefault(rank, []).append(turn)

    def grant(self, transport: Transport) -> bool:
        """Wait for this rank's next turn; after its last one wait for the end, since to finish is an event too."""
        turns = self._turns.get(transport.rank)
        turn = turns.pop(0) if turns else self._end
        if turn > transport.now() and (self._waits or turn == self._end):
            pause(transport, turn - transport.now())
        return turn < self._end
