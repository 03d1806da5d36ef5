"""SharedMemory: one vector of weights for all workers of a host, read and written without locks.

split  data        when  never                  who  all workers, through one memory
what   nothing is sent                          how   any Rule, directly on the shared weights

    read w, compute g on it                    other workers write at the same time
    w_v <- w_v - eta g_v  for v in the support

If two workers write the same number at once, one of the writes may be lost; that is part of the method.
Parameters that a mini-batch did not touch are not written, and of a sparse gradient only its rows are, so workers whose
samples share no features do not conflict at all. Only plain SGD and Adagrad allow this: a rule with weight decay, or
whose state decays, moves all rows in every update, so with it sparse gradients are made dense. The state of the rule is
private to each worker.

A model that knows which weights a mini-batch touches computes and writes a step of plain SGD itself (descent.py).

With `snapshot` a worker copies the weights before it computes. The forward and the backward pass then use the same w in
all layers, and weights that others have just written are read only once per mini-batch. Such reads are slow, because
the newest values are in the cache of another core.
"""

from __future__ import annotations

from dataclasses import dataclass

from manyhands.collectives.shared_weights import read, shared_weights
from manyhands.collectives.update_counts import UpdateCounts
from manyhands.core.declared_state import RuleState, StateParts
from manyhands.core.flat import DtypeGroup
from manyhands.core.gather import gather
from manyhands.core.rule import Rule, UpdateContext, skips
from manyhands.core.strategy import Batch, Strategy, Traits, Weights
from manyhands.core.weight_slice import WeightSlice, replica_slices
from manyhands.core.worker import Worker
from manyhands.strategies.shared_memory.descent import descend, descending_model


@dataclass
class SharedMemory(Strategy):
    """Lock-free training on one host.

    Args:
        rule: how a gradient is applied.
        snapshot: compute on a private copy of the weights.
    """

    rule: Rule
    snapshot: bool = False

    @property
    def traits(self) -> Traits:
        return Traits(
            lockstep=False,
            on_worker_loss="continues",
            one_host=True,
            joiners=True,
            bounded=False,
            keeps_changes=True,
            lag="counted",
            lag_counts="updates that other workers have written to the shared weights",
        )

    def setup(self, w: Worker) -> None:
        """The shared weights, used in place or copied, and the numbers of their updates.

        The rule's state; the model, if it writes its own steps.
        """
        self.weights = shared_weights(w)
        self.updates = UpdateCounts(w)
        if not self.snapshot:
            w.flat.move_to(self.weights)
        self.slices = replica_slices(w.ops, w.flat, self.rule, self.weights)
        if all(skips(weight_slice.rule) for weight_slice in self.slices):
            w.flat.keep_rows()
        self.descending = None if self.snapshot else descending_model(w, self.slices)

    def join_running(self, w: Worker) -> None:
        """The shared weights are up to date already."""

    def step(self, w: Worker, batch: Batch) -> float:
        """Compute on the current weights and write without a lock."""
        self.updates.read()
        if self.descending is not None and not getattr(batch, "names", ()):
            return descend(w, self.descending, self.slices[0], batch, self.updates)
        if self.snapshot:
            read(w, self.weights)
        loss = w.gradient(batch)
        for group, weight_slice in zip(w.flat.groups, self.slices, strict=True):
            self._write(w, group, weight_slice)
        w.lag = self.updates.written()
        return loss

    def _write(self, w: Worker, group: DtypeGroup, weight_slice: WeightSlice) -> None:
        """Apply a gradient: dense parameters as a whole, of sparse ones the rows that have a gradient."""
        rows = w.flat.rows
        sparse = [slot for slot in group.slots if slot.param_id in rows] if rows else []
        untouched = group.untouched().union(slot.param_id for slot in sparse)
        weight_slice.update(group.grad, UpdateContext(weight_slice.weights, samples=w.samples), untouched)
        for slot in sparse:
            weight_slice.update_rows(
                slot.param_id, rows[slot.param_id], UpdateContext(weight_slice.weights, samples=w.samples)
            )

    def answer(self, w: Worker) -> Weights | None:
        """The shared weights, once all workers have stopped writing."""
        return None if gather(w) is None else w.named(self.weights)

    def declared_state(self, w: Worker) -> StateParts:
        """The state of each worker's rule; that of a new worker starts fresh."""
        return {"rule": RuleState(w.flat.slots, self.slices, "own")}
