"""Shared mean: the workers of one host make the mean of their gradients in memory that all of them read.

    each rank:  barrier · mean[span r] <- (1/P) sum_k gradient_k[span r] · barrier

Gradients are written to memory that all workers read, and the mean is made once, each rank its own span of it. Nothing
is copied: `flat.means` is the mean for all ranks, which they only read. A worker that wants to change it (clipping)
copies it first. It is valid until the next call, whose first barrier all workers must reach.
"""

from __future__ import annotations

import torch
from torch import Tensor

from manyhands.collectives.choose import collective
from manyhands.core import vector_ops
from manyhands.core.port import even_spans
from manyhands.core.worker import Worker


class SharedMean:
    """One worker's view. The model's gradients move into the shared memory."""

    def __init__(self, w: Worker) -> None:
        self._w = w
        self._barrier = collective("auto", w.transport, w.workers).barrier
        groups = list(enumerate(w.flat.groups))
        self._gradients = [
            [w.shared(f"mean.gradient{rank}.{n}", group.outgoing) for n, group in groups] for rank in w.workers
        ]
        self._means = [w.shared(f"mean.{n}", group.grad) for n, group in groups]
        slot = w.workers.index(w.rank)
        self._spans = [even_spans(mean.numel(), len(w.workers))[slot] for mean in self._means]
        w.flat.collect_in(self._gradients[slot])
        w.flat.means = [
            self._means[slot.span.group][slot.span.start : slot.span.stop].view(slot.shape) for slot in w.flat.slots
        ]

    @torch.no_grad()
    def step(self) -> None:
        """Make the mean of all gradients; this worker's has been computed."""
        self._barrier()
        touch_counts = [] if self._w.flat.is_complete else self._touch_counts()
        for number, (mean, span) in enumerate(zip(self._means, self._spans, strict=True)):
            gradients = [memory[number][: mean.numel()][span] for memory in self._gradients]
            if self._w.ops.computes(mean[span], passes=len(gradients)):
                vector_ops.mean(gradients, mean[span])
        self._barrier()
        for group, counts in zip(self._w.flat.groups, touch_counts, strict=False):
            group.touch_counts.copy_(counts)

    def _touch_counts(self) -> list[Tensor]:
        """How many workers touched each parameter: the counts lie behind the gradients."""
        return [
            torch.stack([memory[number][group.weights.numel() :] for memory in self._gradients]).sum(0)
            for number, group in enumerate(self._w.flat.groups)
        ]
