"""AllReduce: every worker has the whole model; gradients are summed over all before each step.

split  data        when  bulk                   who  a collective
what   raw         how   any Rule, the same on every worker

    g = (1/P) sum_k g_k(w; B_k)        all ranks end with the same bits
    w <- w + rule(g)

Between hosts the gradient is summed in buckets while the backward pass is still running, the last layers first. A
separate activity does that, because code inside a backward pass must not block.
Inside one host copying bytes takes the processor's time, so there the workers share one replica, and each of them
updates its own slice of it (collectives/shared_replica.py), unless an optimizer of a user's own updates each worker's
weights: then they share the mean gradient (collectives/shared_mean.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from manyhands.collectives import collective
from manyhands.collectives.shared_mean import SharedMean
from manyhands.collectives.shared_replica import SharedReplica
from manyhands.core.declared_state import RuleState, Scope, StateParts
from manyhands.core.flat import Span
from manyhands.core.port import Tag, on_one_host, recv
from manyhands.core.rule import Rule
from manyhands.core.strategy import Batch, Strategy, Traits, Weights
from manyhands.core.weight_slice import replica_slices
from manyhands.core.worker import Worker

BUCKET, REDUCED = Tag("bucket", credit=4096), Tag("reduced", credit=4096)


@dataclass
class AllReduce(Strategy):
    """Bulk-synchronous training with a collective.

    Args:
        rule: how the mean gradient is applied.
        collective: which algorithm sums; "auto" chooses by link and size.
    """

    rule: Rule
    collective: str = "auto"

    @property
    def traits(self) -> Traits:
        return Traits(
            lockstep=True,
            on_worker_loss="ends",
            averages_gradients=True,
            equal_replicas=True,
            keeps_changes=self._needs_replica,
            lag="always 0",
            lag_counts="all workers update together",
        )

    @property
    def _needs_replica(self) -> bool:
        """Whether every worker must have weights of its own, instead of one replica for all workers of a host."""
        return "replica" in self.rule.needs

    def setup(self, w: Worker) -> None:
        """The weights with their rule; the collective; whether buckets are summed during the backward pass."""
        one_host = on_one_host(w.transport, w.workers)
        self.shared_replica = None
        self.shared_mean = None
        shares = one_host and self.collective == "auto" and len(w.workers) > 1
        if shares and not self._needs_replica:
            self.shared_replica = SharedReplica(w, self.rule)
        elif shares:
            self.shared_mean = SharedMean(w)
        self.slices = (
            replica_slices(w.ops, w.flat, self.rule) if self.shared_replica is None else self.shared_replica.slices
        )
        self.sum = collective(self.collective, w.transport, w.workers)
        self.buckets = w.flat.buckets()
        self.overlaps = not one_host and len(self.buckets) > 1
        if self.overlaps:
            w.transport.spawn(lambda: self._exchange(w), daemon=True)

    def step(self, w: Worker, batch: Batch) -> float:
        """Compute, sum over all workers, update."""
        if self.shared_replica is not None:
            loss = w.gradient(batch)
            self.shared_replica.step()
            return loss
        if self.shared_mean is not None:
            loss = w.gradient(batch)
            self.shared_mean.step()
            return loss
        if self.overlaps:
            loss = self._step_with_overlap(w, batch)
        else:
            loss = w.gradient(batch)
            for group in w.flat.groups:
                self.sum.all_reduce(group.outgoing)
        for group, weight_slice in zip(w.flat.groups, self.slices, strict=True):
            weight_slice.apply_sum(group, len(w.workers), w.samples)
        return loss

    def _step_with_overlap(self, w: Worker, batch: Batch) -> float:
        """Pass every bucket to the exchange activity as soon as its gradients are complete."""
        numbers = {bucket: number for number, bucket in enumerate(self.buckets)}

        def ready(bucket: Span) -> None:
            w.transport.send(w.rank, BUCKET, (numbers[bucket],))

        loss = w.gradient(batch, ready)
        w.transport.send(w.rank, BUCKET, (len(self.buckets),))
        recv(w.transport, REDUCED, frm=w.rank)
        return loss

    def _exchange(self, w: Worker) -> None:
        """The activity that sums buckets in the order in which they become ready, then the touch counts."""
        while True:
            number = recv(w.transport, BUCKET, frm=w.rank).meta[0]
            if number < len(self.buckets):
                self.sum.all_reduce(w.flat.grad(self.buckets[number]))
            else:
                for group in w.flat.groups:
                    self.sum.all_reduce(group.touch_counts)
                w.transport.send(w.rank, REDUCED)

    def answer(self, w: Worker) -> Weights | None:
        """The lead's replica: all are equal."""
        return w.named() if w.rank == w.lead else None

    def declared_state(self, w: Worker) -> StateParts:
        """The rule's state: equal on every worker, or divided among the workers of a host."""
        scope: Scope = "shared" if self.shared_replica is None else "divided"
        return {"rule": RuleState(w.flat.slots, self.slices, scope)}
