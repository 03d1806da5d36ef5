"""Sample weights: the mean over workers is one over samples, also if their mini-batches are unequal.

    g = sum_k n_k g_k / sum_k n_k  =  (1/P) sum_k s_k g_k       s_k = P n_k / sum_j n_j

Methods that average gradients take the mean over the workers. Each worker multiplies its own gradient by s_k before,
which is exactly 1 if all mini-batches are equal: then no bit changes. The sum is found by an all-reduce of one number
at the beginning of a step, unless all workers together hold one replica of the model, whose stages have the same
mini-batch. Where a worker may end before the others, each sends its number to the others instead, and 0 at its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from manyhands.collectives import collective
from manyhands.core.errors import PeerLost
from manyhands.core.port import Tag, recv
from manyhands.core.strategy import Traits
from manyhands.core.worker import Worker

SAMPLES = Tag("loop-samples", carries="nothing", credit=64)


class SampleWeights:
    """How much this worker's gradient counts in each step; made when all workers are set up.

    Args:
        worker: this rank.
        traits: those of its strategy; they say whether gradients are averaged.
        replicas: how many copies of the model the workers hold together.
    """

    def __init__(self, worker: Worker, traits: Traits, replicas: int) -> None:
        self._worker = worker
        self._averages = traits.averages_gradients and replicas > 1
        self._others = {rank for rank in worker.workers if rank != worker.rank}
        self._reducer = None
        if self._averages and not traits.may_end_early:
            self._reducer = collective("auto", worker.transport, worker.workers)

    @torch.no_grad()
    def scale(self, samples: int) -> float:
        """s_k of this step, in which this worker's mini-batch has so many samples."""
        if not self._averages:
            return 1.0
        workers, total = self._reduced(samples) if self._reducer is not None else self._exchanged(samples)
        return workers * samples / total

    def _reduced(self, samples: int) -> tuple[int, int]:
        assert self._reducer is not None
        total = torch.tensor([float(samples)], dtype=torch.float64)
        self._reducer.all_reduce(total)
        return len(self._worker.workers), int(total)

    def _exchanged(self, samples: int) -> tuple[int, int]:
        """The number of workers that have not ended, and the sum of their samples."""
        self._send(samples)
        total = samples
        for rank in sorted(self._others):
            try:
                (theirs,) = recv(self._worker.transport, SAMPLES, frm=rank).meta
            except PeerLost:
                theirs = 0
            total += theirs
            if not theirs:
                self._others.discard(rank)
        return len(self._others) + 1, total

    def _send(self, samples: int) -> None:
        for rank in self._others:
            self._worker.transport.send(rank, SAMPLES, (samples,))

    def end(self) -> None:
        """This worker has left its loop."""
        if self._averages and self._reducer is None:
            self._send(0)


def samples_in(values: Iterable[Any]) -> int | None:
    """How many samples the inputs of a forward pass hold: the length of the first tensor; None if there is none."""
    for value in values:
        if isinstance(value, Tensor) and value.dim():
            return len(value)
        inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
        if (found := samples_in(inner)) is not None:
            return found
    return None
