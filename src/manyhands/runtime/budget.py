"""Budgets of workers in many processes, and how a run stops early (SIGTERM) without leaving anybody waiting.

lock step    Whoever hears that the run is to stop says how many mini-batches it has taken, and takes no more until it
             knows the largest such number: that many are taken by all. So nobody waits for a step that never comes.
otherwise    One counter for all, in the memory of their host or with whoever watches over all. The first to ask after
             the run is to stop closes it. If workers may come later, it is with whoever watches: there it is also
             known who comes.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from manyhands.core.budget import await_arrivals, pause
from manyhands.core.protocols import Transport
from manyhands.runtime.transport import RealTransport


class Pace:
    """How many mini-batches this rank has taken, over all segments of its run; shared by their budgets."""

    def __init__(self, transport: RealTransport) -> None:
        self._member = transport.member
        self._taken = 0
        self._frozen = False
        self._last: int | None = None
        self._news = threading.Condition()
        transport.member.on_finish(self._freeze, self._stop_at)

    def budget(self, steps: int) -> Steps:
        """As many as `steps` from the end of the last budget on."""
        return Steps(self, steps)

    def _freeze(self) -> int:
        with self._news:
            self._frozen = True
            return self._taken

    def _stop_at(self, step: int) -> None:
        with self._news:
            self._last = step
            self._news.notify_all()

    def take(self) -> bool:
        """One more, unless all have stopped here."""
        with self._news:
            while self._frozen and self._last is None:
                self._member.check()
                self._news.wait(0.1)
            if self._last is not None and self._taken >= self._last:
                return False
            self._taken += 1
            return True


class Steps:
    """The same number of mini-batches for every worker."""

    def __init__(self, pace: Pace, steps: int) -> None:
        self._pace = pace
        self._left = steps
        self.stopped = False
        self.arrivals: Sequence[int] = ()

    def grant(self, transport: Transport) -> bool:
        """Whether this rank has not had all of them, and the run goes on."""
        if self._left == 0:
            return False
        self._left -= 1
        self.stopped = not self._pace.take()
        return not self.stopped


class Common:
    """All workers draw from one number of mini-batches.

    Args:
        transport: this rank's.
        total: how many mini-batches there are in all.
        name: tells several budgets of one run apart.
    """

    def __init__(self, transport: RealTransport, total: int, name: str = "budget") -> None:
        self._total = total
        self._name = name
        self._member = transport.member
        self.stopped = False
        self.arrivals: Sequence[int] = ()
        hosts = {host for host, role in zip(transport.hosts, transport.roles, strict=True) if role == "worker"}
        self._cells: memoryview | None = None
        if len(hosts) == 1 and not transport.late:
            self._cells = memoryview(transport.shared(name, 2, torch.int64).numpy())  # type: ignore[arg-type]
            self._lock = transport.lock(name)

    def grant(self, transport: Transport) -> bool:
        """Whoever comes first is served first."""
        if self._cells is None:
            return self._ask(transport)
        with self._lock:
            taken, closed = self._cells
            if taken < self._total and not closed and self._member.finishing:
                self._cells[1] = closed = 1
            self.stopped = bool(closed)
            if closed or taken >= self._total:
                return False
            self._cells[0] = taken + 1
            return True

    def _ask(self, transport: Transport) -> bool:
        answer = self._member.grant(self._name, self._total)
        if not answer["yes"] and answer["coming"]:
            await_arrivals(transport, lambda: self._member.grant(self._name, self._total)["coming"])
        self.stopped, self.arrivals = answer["closed"], answer["arrivals"]
        return bool(answer["yes"])

    def enter(self, transport: Transport) -> int | None:
        """From the first grant to the last."""
        while True:
            answer = self._member.enter(self._name, self._total)
            self.arrivals = answer["arrivals"]
            if answer["over"]:
                return None
            if answer["taken"]:
                return int(answer["taken"])
            pause(transport)

    def arrived(self, transport: Transport) -> None:
        """It is no longer on its way."""
        self._member.arrived(self._name)
