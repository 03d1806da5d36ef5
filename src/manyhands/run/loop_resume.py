"""Resume: what a rank continues from when its loop has loaded a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from manyhands.core.state import Snapshot
from manyhands.core.worker import Worker
from manyhands.run.random_state import random_state, restore_random


@dataclass(frozen=True)
class Resume:
    """A checkpoint that was loaded before the first step.

    Args:
        name: the same on all ranks that have loaded it.
        snapshot: weights, buffers and the state of the strategy.
        random: the random state of this rank; empty if the checkpoint has none of it.
    """

    name: str
    snapshot: Snapshot
    random: Mapping[str, Tensor]

    @contextmanager
    def keeping_random(self, w: Worker) -> Iterator[None]:
        """What is drawn in here was drawn at the beginning of the run that is continued, and must not be again."""
        now = random_state()
        yield
        restore_random({**now, **{name: x for name, x in self.random.items() if name == "own"}}, w.random)
