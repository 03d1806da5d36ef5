"""Shared replica: the workers of one host have one memory for the weights, and each of them updates its own spans.

    each rank:  barrier · w[span r] <- w[span r] + rule(mean of all gradients on span r) · barrier

Gradients are written to memory that all workers read, so nothing is sent or copied, and each update is made once, not P
times. After the first barrier all gradients are there; after the second all weights are updated, and no worker reads
gradients any more. This is for methods in lock step only: in others a worker would compute with weights that another
one is writing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from manyhands.collectives.choose import collective
from manyhands.collectives.shared_weights import shared_weights
from manyhands.core.rule import Rule, UpdateContext
from manyhands.core.sharding import cut
from manyhands.core.vector_ops import UNCHARGED
from manyhands.core.weight_slice import WeightSlice
from manyhands.core.worker import Worker


class SharedReplica:
    """One worker's view. The model's weights and gradients move into the shared memory."""

    def __init__(self, w: Worker, rule: Rule) -> None:
        self._w = w
        self._barrier = collective("auto", w.transport, w.workers).barrier
        slot = w.workers.index(w.rank)
        w.flat.move_to(shared_weights(w, "replica.weights"))
        self._gradients = [self._memory(rank) for rank in w.workers]
        w.flat.collect_in(self._gradients[slot])
        shards = cut(w.flat, "size", len(w.workers), rule, at_most=True)
        mine = shards[slot] if slot < len(shards) else []
        self.slices = [WeightSlice(w.ops, span, w.flat.weights(span), w.flat.slots, rule) for span in mine]

    def _memory(self, rank: int) -> list[Tensor]:
        """The memory of a worker's gradient, one tensor per group of the model."""
        groups = self._w.flat.groups
        return [self._w.shared(f"replica.gradient{rank}.{n}", group.outgoing) for n, group in enumerate(groups)]

    def step(self) -> None:
        """Update the weights by the mean of all gradients; this worker's has been computed."""
        w, workers = self._w, len(self._gradients)
        self._barrier()
        untouched = self._untouched()
        for weight_slice in self.slices:
            group, start, stop = weight_slice.span
            gradients = [memory[group][start:stop] for memory in self._gradients]
            weight_slice.apply_mean(
                gradients, UpdateContext(weight_slice.weights, samples=w.samples, count=workers), untouched
            )
        self._barrier()

    def _untouched(self) -> Sequence[int]:
        """The parameters that no worker touched: the touch counts lie behind the gradients."""
        found: list[int] = []
        for number, group in enumerate(self._w.flat.groups):
            touch_counts = [memory[number][group.weights.numel() :] for memory in self._gradients]
            if UNCHARGED.computes(*touch_counts) and not any(bool(one.all()) for one in touch_counts):
                first, total = group.slots[0].param_id, torch.stack(touch_counts).sum(0)
                found += [first + n for n in torch.nonzero(total == 0).flatten().tolist()]
        return found
