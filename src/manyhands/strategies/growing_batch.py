"""GrowingBatch: the mini-batch grows at those points of a run where others lower the learning rate.

split  data        when  bulk, once per large mini-batch        who  a collective
what   raw         how   any Rule, the same on every worker

    noise  ~  eta N / (B (1 - mu))                eta / f and f B reduce it equally

    part of the run     0 ...... 0.3 ...... 0.6 ...... 0.8 ...... 1
    mini-batch            B        f B        f^2 B      f^2 B           up to `most` times B
    learning rate         eta      eta        eta        eta / f         from then on

A worker sums the gradients of the mini-batches that make up a large one, and only then are they averaged over all
workers: the larger the mini-batch, the fewer bytes per sample. An incomplete large one at the end of the run makes a
smaller step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from manyhands.collectives import collective
from manyhands.core.declared_state import CustomState, NumberState, RuleState, StateParts
from manyhands.core.errors import Refused, refuse_unless
from manyhands.core.flat import ParamSlot
from manyhands.core.rule import Rule, UpdateContext
from manyhands.core.state import add, named
from manyhands.core.strategy import Batch, Saved, Strategy, Traits, Weights
from manyhands.core.weight_slice import replica_slices
from manyhands.core.worker import Worker


def noise_scale(lr: float, samples: int, batch: int, momentum: float = 0.0) -> float:
    """The scale of SGD's random fluctuations, eta N / (B (1 - mu)), for mini-batches much smaller than the data."""
    return lr * samples / (batch * (1 - momentum))


@dataclass
class GrowingBatch(Strategy):
    """Bulk-synchronous training with mini-batches that grow.

    Args:
        rule: how the mean gradient is applied.
        factor: f, by which the mini-batch is multiplied at a milestone.
        milestones: when: as fractions of the run, or in samples.
        most: how many times the first mini-batch it may be; after that the learning rate falls instead.
    """

    rule: Rule
    factor: int = 5
    milestones: Sequence[float] = (0.3, 0.6, 0.8)
    most: int = 25

    @property
    def traits(self) -> Traits:
        grows = "it decides itself how many mini-batches make a step"
        together = "all workers update together, once for each large mini-batch"
        return Traits(
            lockstep=True,
            on_worker_loss="ends",
            plans_ahead=True,
            needs_step=grows,
            lag="always 0",
            lag_counts=together,
        )

    def __post_init__(self) -> None:
        refuse_unless(self.factor >= 1, "factor", self.factor, ">= 1")
        refuse_unless(self.most >= 1, "most", self.most, ">= 1")
        rising = list(self.milestones) == sorted(self.milestones) and min(self.milestones, default=1) > 0
        refuse_unless(rising, "milestones", tuple(self.milestones), "rising and > 0")
        self.in_samples = max(self.milestones, default=1) >= 1

    def _phase(self, w: Worker) -> tuple[int, float]:
        """How many mini-batches make up a large one now, and the divisor of the learning rate."""
        if self.in_samples:
            return self._phase_at(w.samples)
        if not w.steps:
            raise Refused(
                "steps is missing: milestones are fractions of a run of unknown length, but must be in samples"
            )
        return self._phase_at(w.step / w.steps)

    def _phase_at(self, where: float) -> tuple[int, float]:
        """The same at a fraction of the run, or at a number of samples."""
        passed = bisect_right(self.milestones, where)
        grown = 0
        while grown < passed and self.factor ** (grown + 1) <= self.most:
            grown += 1
        return self.factor**grown, float(self.factor ** (passed - grown))

    def setup(self, w: Worker) -> None:
        """The weights with their rule; the sum of gradients, its mini-batches, and steps since the last update."""
        self.slices = replica_slices(w.ops, w.flat, self.rule)
        self.reducer = collective("auto", w.transport, w.workers)
        self.sums = [torch.zeros_like(group.outgoing) for group in w.flat.groups]
        self.count = self.taken = 0
        self.rate_divisor = 1.0

    def step(self, w: Worker, batch: Batch) -> float:
        """Add to the sum; once it is a large mini-batch, all workers update."""
        loss = w.gradient(batch)
        for total, group in zip(self.sums, w.flat.groups, strict=True):
            w.ops.add(total, group.outgoing)
        self.count += 1
        self.taken += 1
        size, self.rate_divisor = self._phase(w)
        if self.taken >= size:
            self._update(w, w.step + 1)
        return loss

    def _update(self, w: Worker, steps: int) -> None:
        """One update with the mean over the mini-batches of all workers, which have taken so many steps."""
        before = w.samples_before(steps - self.taken)
        counted = torch.tensor([float(self.count)])
        self.reducer.all_reduce(counted)
        for total, group, weight_slice in zip(self.sums, w.flat.groups, self.slices, strict=True):
            self.reducer.all_reduce(total)
            w.ops.copy(total, group.outgoing)
            w.ops.zero(total)
            at = UpdateContext(weight_slice.weights, samples=before, count=len(w.workers), rate=1 / self.rate_divisor)
            weight_slice.update(group.grad, at, group.untouched(), over=round(counted.item()))
        self.count = self.taken = 0

    def finish(self, w: Worker) -> None:
        """Update with an incomplete large mini-batch."""
        if self.taken:
            self._update(w, w.step)

    def answer(self, w: Worker) -> Weights | None:
        """The lead's replica: all are equal."""
        return w.named() if w.rank == w.lead else None

    # -- checkpoints ------------------------------------------------------------------------------

    def declared_state(self, w: Worker) -> StateParts:
        """The rule's state; every worker's sum and its number of mini-batches; steps since the last update."""
        return {
            "rule": RuleState(w.flat.slots, self.slices),
            "sum": CustomState("inherited", partial(self._touched_sums, w), partial(self._add_sums, w)),
            "count": NumberState(self, "count", "inherited"),
            "taken": NumberState(self, "taken"),
        }

    def _touched_sums(self, w: Worker) -> Saved:
        return named([slot for slot in w.flat.slots if self._touch_count(w, slot)], self.sums)

    def _add_sums(self, w: Worker, saved: Sequence[Saved]) -> None:
        for sums in saved:
            add(w.flat.slots, self.sums, sums)
            for slot in w.flat.slots:
                self._touch_count(w, slot).add_(slot.name in sums)

    def _touch_count(self, w: Worker, slot: ParamSlot) -> Tensor:
        """How many mini-batches have touched a parameter: the number is behind the gradients, as in `Flat`."""
        group = w.flat.groups[slot.span.group]
        return self.sums[slot.span.group][group.weights.numel() + slot.param_id - group.slots[0].param_id]
