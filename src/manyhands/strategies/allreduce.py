"""AllReduce: every worker has the whole model; gradients are summed over all before each step.

split  data        when  bulk                   who  a collective
what   raw         how   any Rule, the same on every worker

    g = (1/P) sum_k g_k(w; B_k)        all ranks end with the same bits
    w <- w + rule(g)

Between hosts the gradient leaves in buckets while the backward pass is still running: the last layers
come first. An activity of its own does the exchange, since nobody may wait inside a backward pass.
Inside one host moving bytes is computing, so there workers pool their weights: each moves its own stretch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from manyhands.core.flat import Part, Span
from manyhands.core.holding import Holding, replica
from manyhands.core.protocols import At, Batch, Rule, Saved, Tag, Weights, on_one_host, recv
from manyhands.core.saving import join, pieces, restore, section, under
from manyhands.core.worker import Worker
from manyhands.topology.collectives import all_reducer
from manyhands.topology.pool import Pool

BUCKET, REDUCED = Tag("bucket", credit=4096), Tag("reduced", credit=4096)


def apply_sum(w: Worker, part: Part, held: Holding) -> None:
    """Move the weights of one part by a gradient that was summed over everyone: by the mean."""
    w.move(part.outgoing.nbytes)
    at = At(held.weights, samples=w.samples, count=len(w.workers))
    held.update(part.grad, at, part.untouched(), over=len(w.workers))


def rule_state(w: Worker, held: Sequence[Holding]) -> Saved | None:
    """What the rule of a replica remembers, on the lead: it is the same on every worker."""
    return under("rule", join(pieces(held, w.flat.places))) if w.rank == w.lead else None


@dataclass
class AllReduce:
    """Bulk-synchronous training with a collective.

    Args:
        rule: how the mean gradient is applied.
        collective: which algorithm sums; "auto" chooses by place and size.
    """

    rule: Rule
    collective: str = "auto"
    lockstep: ClassVar[bool] = True
    one_host: ClassVar[bool] = False

    def setup(self, w: Worker) -> None:
        """The weights with their rule; the collective; whether buckets may leave early."""
        one_host = on_one_host(w.transport, w.workers)
        self.pool = None
        if one_host and len(w.workers) > 1 and self.collective == "auto" and not w.flat.is_meta:
            self.pool = Pool(w, self.rule)
        self.held = replica(w.flat, self.rule) if self.pool is None else self.pool.held
        self.sum = all_reducer(self.collective, w.transport, w.workers)
        self.buckets = w.flat.buckets()
        self.overlaps = not one_host and len(self.buckets) > 1
        if self.overlaps:
            w.transport.spawn(lambda: self.exchange(w), daemon=True)

    def step(self, w: Worker, batch: Batch) -> float:
        """Compute, sum over everyone, update."""
        if self.pool is not None:
            loss = w.gradient(batch)
            self.pool.step()
            return loss
        if self.overlaps:
            loss = self.step_with_overlap(w, batch)
        else:
            loss = w.gradient(batch)
            for part in w.flat.parts:
                self.sum.all_reduce(part.outgoing)
        for part, held in zip(w.flat.parts, self.held, strict=True):
            apply_sum(w, part, held)
        return loss

    def step_with_overlap(self, w: Worker, batch: Batch) -> float:
        """Hand every bucket to the exchange as soon as it is ready."""
        numbers = {bucket: number for number, bucket in enumerate(self.buckets)}

        def fired(bucket: Span) -> None:
            w.transport.send(w.rank, BUCKET, (numbers[bucket],))

        loss = w.gradient(batch, fired)
        w.transport.send(w.rank, BUCKET, (len(self.buckets),))
        recv(w.transport, REDUCED, frm=w.rank)
        return loss

    def exchange(self, w: Worker) -> None:
        """The activity that sums buckets in the order they fire, then the marks."""
        while True:
            number = recv(w.transport, BUCKET, frm=w.rank).meta[0]
            if number < len(self.buckets):
                self.sum.all_reduce(w.flat.grad(self.buckets[number]))
            else:
                for part in w.flat.parts:
                    self.sum.all_reduce(part.marks)
                w.transport.send(w.rank, REDUCED)

    def answer(self, w: Worker) -> Weights | None:
        """All replicas are equal."""
        return w.named() if w.rank == w.lead else None

    def state(self, w: Worker) -> Saved | None:
        """What the rule remembers, which is the same on every worker, or pooled."""
        if self.pool is not None:
            pooled = self.pool.state()
            return None if pooled is None else under("rule", pooled)
        return rule_state(w, self.held)

    def restore(self, w: Worker, saved: Saved) -> None:
        """The same for everyone, whatever their number."""
        restore(self.held, w.flat.places, section(saved, "rule"))
