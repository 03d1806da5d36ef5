"""Budgets of workers in several processes, and how a run stops early (SIGTERM) without a rank that waits for ever.

lockstep     A worker that is asked to stop reports how many mini-batches it has taken, and takes no more until it knows
             the largest such number of all workers: all of them take that many. So no rank waits for a missing step.
otherwise    One counter for all, in shared memory of their host or in the watcher. The first request after the run was
             asked to stop closes it. If workers may join later, the watcher has it, since it knows which ranks join.

A run has a budget for every segment between two checkpoints or evaluations, and may have thousands. A region of shared
memory costs every rank and the watcher an open file, so that many budgets lie in one region:

    region budget/0    [ taken closed | taken closed | ... ]     budget0, budget1, ..., budget4095
    region budget/1    [ taken closed | ...                      budget4096, ...
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence

import torch

from manyhands.core.budget import await_arrivals, pause
from manyhands.core.port import Transport
from manyhands.runtime.transport.transport import RealTransport

PER_REGION = 4096
"""Budgets in one region of shared memory."""


class Pace:
    """Counts the mini-batches of this rank over all segments of its run; their budgets share it."""

    def __init__(self, transport: RealTransport) -> None:
        self._control = transport.control
        self._taken = 0
        self._frozen = False
        self._last: int | None = None
        self._changed = threading.Condition()
        transport.control.on_finish(self._freeze, self._stop_at)

    def budget(self, steps: int) -> Steps:
        """A budget of `steps` more mini-batches."""
        return Steps(self, steps)

    def _freeze(self) -> int:
        with self._changed:
            self._frozen = True
            return self._taken

    def _stop_at(self, step: int) -> None:
        with self._changed:
            self._last = step
            self._changed.notify_all()

    def take(self) -> bool:
        """Take one more mini-batch, unless all ranks stop at this one."""
        with self._changed:
            while self._frozen and self._last is None:
                self._control.check()
                self._changed.wait(0.1)
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
        """Whether this rank may take one more, and the run has not been stopped."""
        if self._left == 0:
            return False
        self._left -= 1
        self.stopped = not self._pace.take()
        return not self.stopped


class SharedBudget:
    """All workers draw from one number of mini-batches.

    Args:
        transport: the transport of this rank.
        total: how many mini-batches all workers take together.
        name: a word and a number, such as budget7, that no other budget of the run has; those of one word share memory.
        closes: whether it ends when the run is asked to stop; if not, the program decides when to.
    """

    def __init__(self, transport: RealTransport, total: int, name: str, *, closes: bool = True) -> None:
        self._total = total
        self._name = name
        self._closes = closes
        self._control = transport.control
        self.stopped = False
        self.arrivals: Sequence[int] = ()
        hosts = {host for host, role in zip(transport.hosts, transport.roles, strict=True) if role == "worker"}
        self._cells: memoryview | None = None
        if len(hosts) == 1 and not transport.pending_ranks:
            self._cells = _cells(transport, name)
            self._lock = transport.lock(name)

    def grant(self, transport: Transport) -> bool:
        """Whether one more is left; requests are served in the order of their arrival."""
        if self._cells is None:
            return self._ask(transport)
        with self._lock:
            taken, closed = self._cells
            if taken < self._total and not closed and self._closes and self._control.finishing:
                self._cells[1] = closed = 1
            self.stopped = bool(closed)
            if closed or taken >= self._total:
                return False
            self._cells[0] = taken + 1
            return True

    def _ask(self, transport: Transport) -> bool:
        answer = self._control.grant(self._name, self._total, self._closes)
        if not answer["yes"] and answer["joining"]:
            await_arrivals(transport, lambda: self._control.grant(self._name, self._total)["joining"])
        self.stopped, self.arrivals = answer["closed"], answer["arrivals"]
        return bool(answer["yes"])

    def enter(self, transport: Transport) -> int | None:
        """Begin to join: how many were granted, once there is one; None if the budget is used up."""
        while True:
            answer = self._control.enter(self._name, self._total)
            self.arrivals = answer["arrivals"]
            if answer["over"]:
                return None
            if answer["taken"]:
                return int(answer["taken"])
            pause(transport)

    def arrived(self, transport: Transport) -> None:
        """This rank has finished joining."""
        self._control.arrived(self._name)


def _cells(transport: RealTransport, name: str) -> memoryview:
    """The two numbers of a budget: how many mini-batches are taken, and whether it is closed."""
    numbered = re.fullmatch(r"(\w*?)(\d+)", name)
    assert numbered is not None, f"the budget {name!r} has no number"
    region, place = divmod(int(numbered[2]), PER_REGION)
    numbers = transport.shared(f"{numbered[1]}/{region}", 2 * PER_REGION, torch.int64).numpy()
    return memoryview(numbers)[2 * place : 2 * place + 2]  # type: ignore[arg-type]
