"""Budget: how long a job trains, counted in samples.

`steps` counts updates of size replicas x batch: a job ends when it has consumed steps x replicas x batch_size samples.
Workers in lock step take `steps` mini-batches each. All other workers draw from one common budget, so that a fast
worker does more of the work than a slow one.

A run that is saved or evaluated from time to time consists of segments, each with a budget of its own. When the budget
of a segment is used up, all workers pause and the state is saved; then the next segment begins.

A worker that joins later enters the current segment, after its first grant and before its last one, so that it never
joins during a pause. When `grant` returns False, `arrivals` lists all workers that have entered the segment, and they
are all set up: `grant` waits for those that are still joining.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol, runtime_checkable

from manyhands.core.port import Tag, Transport, recv

NOTHING = Tag("nothing", carries="nothing")
TEAM_GRANT = Tag("team-grant", carries="nothing", credit=64)
PAUSE = 1e-3
"""Seconds between two checks for workers that join."""


class Budget(Protocol):
    """Decides how many mini-batches the workers take in one segment."""

    stopped: bool
    """Whether it was closed before it was used up, because the run is stopped early."""
    arrivals: Sequence[int]
    """The ranks that have joined in this segment; complete once `grant` returns False."""

    def grant(self, transport: Transport) -> bool:
        """Whether this rank may take one more mini-batch."""


@runtime_checkable
class JoinableBudget(Budget, Protocol):
    """A budget of a segment that workers may join."""

    def enter(self, transport: Transport) -> int | None:
        """Join once the segment has begun; how many mini-batches have been granted. None if it is used up."""

    def arrived(self, transport: Transport) -> None:
        """Report that this rank, after `enter`, is set up and ready to work."""


def pause(transport: Transport, seconds: float = PAUSE) -> None:
    """Wait while other ranks and activities run."""
    transport.recv(NOTHING, frm=transport.rank, timeout=seconds)


def await_arrivals(transport: Transport, joining: Callable[[], Collection[int]]) -> None:
    """Wait until no living worker is between `enter` and `arrived`; `joining` lists those that are."""
    while not set(transport.peers("worker")).isdisjoint(joining()):
        pause(transport)


class FixedSteps:
    """The same number of mini-batches for every rank."""

    stopped = False
    arrivals: Sequence[int] = ()

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._taken: dict[int, int] = {}

    def grant(self, transport: Transport) -> bool:
        """Whether this rank has mini-batches left."""
        taken = self._taken.get(transport.rank, 0)
        self._taken[transport.rank] = taken + 1
        return taken < self._steps


class TeamBudget:
    """A budget from which the first member of a team draws for all of them.

    Args:
        budget: what is left for all teams.
        members: the ranks of this team.
    """

    def __init__(self, budget: Budget, members: Transport) -> None:
        self._budget = budget
        self._members = members
        self.stopped = False
        self.arrivals: Sequence[int] = ()

    def grant(self, transport: Transport) -> bool:
        """Whether the team may take one more mini-batch."""
        members = self._members
        if members.rank == 0:
            granted, stopped = self._budget.grant(transport), self._budget.stopped
            for other in range(1, members.size):
                members.send(other, TEAM_GRANT, (granted, stopped))
        else:
            granted, stopped = recv(members, TEAM_GRANT, frm=0).meta
        self.stopped = self._budget.stopped = stopped
        return bool(granted)


class Segment(NamedTuple):
    """A part of a run; `stop` is the step, counted in updates of size replicas x batch, at which it ends."""

    stop: int
    budget: Budget
    saves: bool = True
    """Whether it ends with a checkpoint."""
    evaluates: bool = False
    """Whether it ends with an evaluation of the weights."""


def segments(
    start: int, steps: int, every: int | None, budget: Callable[[int], Budget], evaluate_every: int | None = None
) -> list[Segment]:
    """The segments from `start` to `steps`, cut at the multiples of `every` and `evaluate_every`.

    `budget` makes the budget for a number of steps. The last segment ends with a checkpoint but without an evaluation:
    the caller evaluates the final weights.
    """
    saves, evaluations = ({*range(0, steps, often)} if often else set() for often in (every, evaluate_every))
    stops = [*sorted(stop for stop in saves | evaluations if stop > start), steps]
    return [
        Segment(stop, budget(stop - begin), stop in saves or stop == steps, stop in evaluations)
        for begin, stop in pairwise([start, *stops])
    ]
