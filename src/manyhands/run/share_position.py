"""SharePosition: how far a worker is in the mini-batches of `share`, so that a resumed loop takes the others only.

share(data, 16, epochs=2)       100 mini-batches for 2 workers; saved when each has taken 30
resumed by 3 workers            base 60: the same call grants the 40 that are left
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

from manyhands.core.errors import refuse_unless
from manyhands.run.loader_position import END, Facts
from manyhands.run.random_state import random_state, restore_random
from manyhands.splits.data import Share


class SharePosition:
    """The position of one worker in the last call of `share`."""

    def __init__(self) -> None:
        self.before_batch: Callable[[], None] = lambda: None
        """Called when the loop asks for a batch."""
        self.keeps_open: Callable[[], bool] = lambda: False
        """Whether a share that the loop leaves is interrupted, instead of over."""
        self.shares = 0
        """How many shares of the data were made, each in a random order of its own."""
        self._base = self._taken = self._batch_size = 0
        self._is_over = True
        self._resumed: Facts | None = None
        self._placed: Facts | None = None

    def begin(self, batch_size: int) -> int:
        """A call of `share`; how many mini-batches of all replicas it granted before the checkpoint was saved."""
        resumed, self._resumed = self._resumed, None
        self._placed, self._base = resumed, 0
        if resumed is not None and resumed["taken"] is not None:
            self._base = resumed["total"] * resumed["batch_size"] // batch_size
        self._taken, self._batch_size, self._is_over = 0, batch_size, False
        return self._base

    def place(self, share: Share) -> None:
        """Continue in the data where the checkpoint was saved."""
        resumed, self._placed = self._placed, None
        if resumed is None or resumed["position"] is None:
            return
        same = len(share.dataset) == resumed["samples"]
        bound = f"{resumed['samples']}, as when the checkpoint was saved in the middle of a share"
        refuse_unless(same or resumed["taken"] is None, "the size of the data set", len(share.dataset), bound)
        if same:
            share.position = resumed["position"] * resumed["batch_size"] // share.batch_size

    def counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The same mini-batches; each one counts when the loop takes it."""
        try:
            while (batch := self._next(batches)) is not END:
                self._taken += 1
                yield batch
            self._is_over = True
        finally:
            self._is_over |= not self.keeps_open()

    def _next(self, batches: Iterator[Any]) -> Any:
        self.before_batch()
        return next(batches, END)

    # -- in a checkpoint --------------------------------------------------------------------------

    def facts(self, share: Share | None) -> Facts:
        """Where this worker is: in the middle of a share (`taken` is a number), or between two."""
        return {
            "shares": self.shares,
            "base": self._base,
            "taken": None if self._is_over else self._taken,
            "batch_size": self._batch_size,
            "position": None if share is None else share.position,
            "samples": None if share is None else len(share.dataset),
        }

    def continue_from(self, facts: Sequence[Facts], index: int, replicas: int) -> None:
        """Continue where replica `index` of a checkpoint was; with another number of them, where all were together."""
        at = facts[index if len(facts) == replicas else 0]
        total = at["base"] + sum(one["taken"] or 0 for one in facts)
        position = at["position"]
        if len(facts) != replicas and position is not None:
            position = sum(one["position"] or 0 for one in facts) // replicas
        self.shares = at["shares"] - (position is not None)  # the next share is made as the last one was
        self._resumed = {**at, "total": total, "position": position}


def after(batches: Iterator[Any], skipped: int) -> Iterator[Any]:
    """Those that are left after so many of a stream, which must be read; the random state is then as it was."""
    if skipped:
        before = random_state()
        next(islice(batches, skipped, skipped), None)
        restore_random(before)
    yield from batches
