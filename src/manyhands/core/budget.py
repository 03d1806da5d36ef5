"""Budget: how long a job trains, counted in samples.

`steps` counts updates of size replicas x batch: a job ends when it has consumed steps x replicas x
batch_size samples. Workers that move in lock step take `steps` mini-batches each; all others draw from
one common budget, so that a fast worker does the work a slow one cannot.

A run that is to be saved now and then is a row of segments, each with a budget of its own: at the end of one nobody is
granted anything any more, so everyone comes to rest, the state is saved, and the next one begins.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple, Protocol

from manyhands.core.protocols import Transport


class Budget(Protocol):
    """Grants mini-batches."""

    stopped: bool
    """Whether it was closed before it was used up, because the run is to stop."""

    def grant(self, transport: Transport) -> bool:
        """May this rank take one more mini-batch?"""


class Each:
    """The same number of mini-batches for every rank."""

    stopped = False

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


def segments(start: int, steps: int, every: int | None, budget: Callable[[int], Budget]) -> list[Segment]:
    """From `start` to `steps`, cut at the multiples of `every`; `budget` makes one for a number of steps."""
    cuts = [] if every is None else [cut for cut in range(0, steps, every) if cut > start]
    return [Segment(stop, budget(stop - begin)) for begin, stop in pairwise([start, *cuts, steps])]
