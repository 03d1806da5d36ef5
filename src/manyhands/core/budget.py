"""Budget: how long a job trains, counted in samples.

`steps` counts updates of size replicas x batch: a job ends when it has consumed steps x replicas x
batch_size samples. Workers that move in lock step take `steps` mini-batches each; all others draw from
one common budget, so that a fast worker does the work a slow one cannot.
"""

from __future__ import annotations

from typing import Protocol

from manyhands.core.protocols import Transport


class Budget(Protocol):
    """Grants mini-batches."""

    def grant(self, transport: Transport) -> bool:
        """May this rank take one more mini-batch?"""


class Each:
    """The same number of mini-batches for every rank."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._taken: dict[int, int] = {}

    def grant(self, transport: Transport) -> bool:
        """Whether this rank has not had all its mini-batches."""
        taken = self._taken.get(transport.rank, 0)
        self._taken[transport.rank] = taken + 1
        return taken < self._steps
