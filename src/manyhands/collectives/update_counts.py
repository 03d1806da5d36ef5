"""Update counts: how many updates each worker of a host has made to weights that all of them write.

    worker 0   read: others 0 ----- compute ----- write: others 3, so the lag is 3;   its own count 0 -> 1
    worker 1   ... write, 0 -> 1     write, 1 -> 2     write, 2 -> 3

Every worker writes its own count only, so no increment is lost, without a lock. An update counts once all of it is
written: the lag of a gradient contains the updates that were completed between the beginning of its read and the end of
its own write.
"""

from __future__ import annotations

from collections.abc import MutableSequence
from typing import cast

import torch

from manyhands.core.lag import StepLag, step_lag
from manyhands.core.worker import Worker


class UpdateCounts:
    """The counts of all workers of a host, and what they were when this worker read the weights.

    Args:
        w: this worker.
        name: of the shared memory.
    """

    def __init__(self, w: Worker, name: str = "updates") -> None:
        memory = w.transport.shared(name, len(w.worker_ranks), torch.int64).numpy()
        self._counts = cast(MutableSequence[int], memoryview(memory))  # type: ignore[arg-type]
        self._me = w.worker_ranks.index(w.rank)
        self._before = 0

    def _of_others(self) -> int:
        return sum(self._counts) - self._counts[self._me]

    def read(self) -> None:
        """This worker is about to read the weights."""
        self._before = self._of_others()

    def written(self) -> StepLag:
        """This worker has written its update, which is part of the lag of others from now on: its own lag."""
        self._counts[self._me] += 1
        return step_lag(self._of_others() - self._before)
