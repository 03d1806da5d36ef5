"""Budget: how long a job trains, counted in samples.

`steps` counts updates of size replicas x batch: a job ends when it has consumed steps x replicas x
batch_size samples. Workers that move in lock step take `steps` mini-batches each; all others draw from
one common budget, so that a fast worker does the work a slow one cannot.

A run that is to be saved now and then is a row of segments, each with a budget of its own: at the end of one nobody is
granted anything any more, so everyone comes to rest, the state is saved, and the next one begins.

A worker that comes later enters the stretch that is under way: neither before somebody has begun it, nor after it is
used up, so that it never meets the others at rest. Whoever is granted nothing any more knows who has entered, and that
they are all there: it waits for those who are still on their way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol, runtime_checkable

from manyhands.core.protocols import Tag, Transport

NOTHING = Tag("nothing", carries="nothing")
PAUSE = 1e-3
"""Seconds between two looks at those who come."""


class Budget(Protocol):
    """Grants mini-batches."""

    stopped: bool
    """Whether it was closed before it was used up, because the run is to stop."""
    arrivals: Sequence[int]
    """Who has come while it was under way; all are known once it is used up."""

    def grant(self, transport: Transport) -> bool:
        """May this rank take one more mini-batch?"""


@runtime_checkable
class Open(Budget, Protocol):
    """A budget that others may come to."""

    def enter(self, transport: Transport) -> int | None:
        """Come in while it is under way; says how much of it is taken. None if it is used up."""

    def arrived(self, transport: Transport) -> None:
        """Whoever has come in is ready to work."""


def pause(transport: Transport, until: float = PAUSE) -> None:
    """Let some time pass, and others work."""
    transport.recv(NOTHING, frm=transport.rank, timeout=until)


def await_arrivals(transport: Transport, coming: Callable[[], Collection[int]]) -> None:
    """Wait until nobody who is still there is on its way."""
    while not set(transport.peers("worker")).isdisjoint(coming()):
        pause(transport)


class Each:
    """The same number of mini-batches for every rank."""

    stopped = False
    arrivals: Sequence[int] = ()

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._taken: dict[int, int] = {}

    def grant(self, transport: Transport) -> bool:
        """Whether this rank has not had all its mini-batches."""
        taken = self._taken.get(transport.rank, 0)
        self._taken[transport.rank] = taken + 1
        return taken < self._steps


class Segment(NamedTuple):
    """A stretch of a run; `stop` is the step, counted in updates of size replicas x batch, at which it ends."""

    stop: int
    budget: Budget
    saves: bool = True
    """Whether a checkpoint is due then."""
    evaluates: bool = False
    """Whether the weights are to be evaluated then."""


def segments(
    start: int, steps: int, every: int | None, budget: Callable[[int], Budget], evaluate_every: int | None = None
) -> list[Segment]:
    """From `start` to `steps`, cut at the multiples of both; `budget` makes one for a number of steps.

    What is due at the end is a checkpoint: the weights that a run ends with are evaluated by whoever asked for it.
    """
    due, looks = ({*range(0, steps, often)} if often else set() for often in (every, evaluate_every))
    stops = [*sorted(cut for cut in due | looks if cut > start), steps]
    return [
        Segment(stop, budget(stop - begin), stop in due or stop == steps, stop in looks)
        for begin, stop in pairwise([start, *stops])
    ]
