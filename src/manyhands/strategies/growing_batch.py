"""GrowingBatch: where others would lower the learning rate, the mini-batch grows.

split  data        when  bulk, after so many mini-batches as make up a large one        who  a collective
what   raw         how   any Rule, the same on every worker

    noise  ~  eta N / (B (1 - mu))                eta / f and f B make it equally small

    part of the run     0 ...... 0.3 ...... 0.6 ...... 0.8 ...... 1
    mini-batch            B        f B        f^2 B      f^2 B           as long as it is at most `most` times B
    learning rate         eta      eta        eta        eta / f         from then on

A worker adds up the gradients of the mini-batches that make up a large one, and only then all are averaged: the longer
the run, the less is sent. What is left of a large one when the run ends makes a smaller one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from manyhands.core.errors import Refused, refuse_unless
from manyhands.core.flat import Place
from manyhands.core.holding import replica
from manyhands.core.protocols import At, Batch, Rule, Saved, Weights
from manyhands.core.saving import add, collect, inherited, join, named, pieces, restore, section, under
from manyhands.core.worker import Worker
from manyhands.topology.collectives import all_reducer


def noise_scale(lr: float, samples: int, batch: int, momentum: float = 0.0) -> float:
    """How much a run is shaken: eta N / (B (1 - mu)), for mini-batches much smaller than the data."""
    return lr * samples / (batch * (1 - momentum))


@dataclass
class GrowingBatch:
    """Bulk-synchronous training with mini-batches that grow.

    Args:
        rule: how the mean gradient is applied.
        factor: f, by how much a mini-batch grows.
        milestones: when: as parts of the run, or in samples.
        most: how many times the first mini-batch it may be; then the learning rate falls instead.
    """

    rule: Rule
    factor: int = 5
    milestones: Sequence[float] = (0.3, 0.6, 0.8)
    most: int = 25
    lockstep: ClassVar[bool] = True
    one_host: ClassVar[bool] = False

    def __post_init__(self) -> None:
        refuse_unless(self.factor >= 1, "factor", self.factor, ">= 1")
        refuse_unless(self.most >= 1, "most", self.most, ">= 1")
        rising = list(self.milestones) == sorted(self.milestones) and min(self.milestones, default=1) > 0
        refuse_unless(rising, "milestones", tuple(self.milestones), "rising and > 0")
        self.in_samples = max(self.milestones, default=1) >= 1

    def phase(self, w: Worker) -> tuple[int, float]:
        """How many mini-batches make up a large one now, and what the learning rate is divided by."""
        if self.in_samples:
            return self.phase_at(w.samples)
        if not w.steps:
            raise Refused("steps is missing: give milestones in samples, for nobody knows how long this run is")
        return self.phase_at(w.step / w.steps)

    def phase_at(self, where: float) -> tuple[int, float]:
        """The same at some part of the run, or number of samples."""
        passed = bisect_right(self.milestones, where)
        grown = 0
        while grown < passed and self.factor ** (grown + 1) <= self.most:
            grown += 1
        return self.factor**grown, float(self.factor ** (passed - grown))

    def setup(self, w: Worker) -> None:
        """The weights with their rule; the sum of gradients; mini-batches in it, and steps since it was begun."""
        self.held = replica(w.flat, self.rule)
        self.everyone = all_reducer("auto", w.transport, w.workers)
        self.sums = [torch.zeros_like(part.outgoing) for part in w.flat.parts]
        self.count = self.taken = 0
        self.slower = 1.0

    def step(self, w: Worker, batch: Batch) -> float:
        """Add to the sum; if that makes a large mini-batch, all take one step."""
        loss = w.gradient(batch)
        for total, part in zip(self.sums, w.flat.parts, strict=True):
            total.add_(part.outgoing)
        self.count += 1
        self.taken += 1
        size, self.slower = self.phase(w)
        if self.taken >= size:
            self.update(w)
        return loss

    def update(self, w: Worker) -> None:
        """One step with the mean over everyone's mini-batches."""
        counted = torch.tensor([float(self.count)])
        self.everyone.all_reduce(counted)
        for total, part, held in zip(self.sums, w.flat.parts, self.held, strict=True):
            self.everyone.all_reduce(total)
            w.move(total.nbytes)
            part.outgoing.copy_(total)
            total.zero_()
            at = At(held.weights, samples=w.samples, count=len(w.workers), rate=1 / self.slower)
            held.update(part.grad, at, part.untouched(), over=round(counted.item()))
        self.count = self.taken = 0

    def finish(self, w: Worker) -> None:
        """What is left makes a smaller one."""
        if self.taken:
            self.update(w)

    def answer(self, w: Worker) -> Weights | None:
        """All replicas are equal."""
        return w.named() if w.rank == w.lead else None

    # -- checkpoints ------------------------------------------------------------------------------

    def state(self, w: Worker) -> Saved | None:
        """What the rule remembers; every worker's sum, and how many mini-batches are in it."""
        touched = [place for place in w.flat.places if self.mark(w, place)]
        mine = under("sum", named(touched, self.sums)) | {"count": torch.tensor(self.count)}
        saved = collect(w, mine, of_all=True)
        if saved is None:
            return None
        return saved | under("rule", join(pieces(self.held, w.flat.places))) | {"taken": torch.tensor(self.taken)}

    def restore(self, w: Worker, saved: Saved) -> None:
        """The sums of workers that are gone go to those that are left."""
        restore(self.held, w.flat.places, section(saved, "rule"))
        self.taken = int(saved["taken"])
        for old in inherited(w, saved):
            self.count += int(old["count"])
            add(w.flat.places, self.sums, section(old, "sum"))
            for place in w.flat.places:
                self.mark(w, place).add_(f"sum/{place.name}" in old)

    def mark(self, w: Worker, place: Place) -> Tensor:
        """How often a parameter was touched: a number behind the gradients, as in `Flat`."""
        part = w.flat.parts[place.span.part]
        return self.sums[place.span.part][part.weights.numel() + place.mark - part.places[0].mark]
