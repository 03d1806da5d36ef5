"""Svrg: lock-free steps whose variance is reduced by a full gradient, computed anew in every epoch.

split  data        when  two barriers per epoch, free in between       who  all workers, through shared memory
what   nothing is sent                          how   any Rule, straight into the shared weights

    an epoch     u0 <- u                                                  after a barrier: all writes to u are done
    full steps   sum_k <- sum_k + b grad f_B(u0)                          each worker over its own samples
                 mu = (1/n) sum_k sum_k                                   after a barrier: all sums are complete
    inner steps  v = grad f_B(u^) - grad f_B(u0) + mu;  u <- u - eta v    u^ read, u written without a lock

A step is one mini-batch. The first ones of an epoch make mu; for each of the others the gradient is computed twice, at
u0 and then, as late as possible, at u^. With a pass for mu and two for the others an epoch consumes 3 n samples, as in
the paper.

Workers take equally many steps (M per thread in the paper); otherwise a worker could wait at the barrier for one that
has no samples left. mu is the mean over the mini-batches of that many steps. If a worker's samples are a multiple of
them, it is the full gradient; else some samples count twice, or are left for the next epoch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from manyhands.collectives import collective
from manyhands.collectives.shared_weights import read, shared_weights
from manyhands.collectives.update_counts import UpdateCounts
from manyhands.core.declared_state import CustomState, RuleState, StateParts, VectorState
from manyhands.core.errors import refuse_unless
from manyhands.core.gather import gather
from manyhands.core.rule import Rule, UpdateContext
from manyhands.core.strategy import Batch, Saved, Strategy, Traits, Weights
from manyhands.core.weight_slice import replica_slices
from manyhands.core.worker import Worker

UNCOUNTED = 4
"""Full steps of an epoch if the number of samples is unknown."""


SEVERAL = "a step compares the gradients of one mini-batch at two points, and begins with a pass over all data"


@dataclass
class Svrg(Strategy):
    """Asynchronous variance reduction on one host.

    Args:
        rule: how v is applied.
        full_steps: mini-batches per worker in mu; None: one pass over all samples.
        inner_steps: M, mini-batches per worker after that; None: twice as many.
    """

    rule: Rule
    full_steps: int | None = None
    inner_steps: int | None = None

    @property
    def traits(self) -> Traits:
        counts = (
            "updates that other workers have written to the shared weights; a full step writes none, and has no lag"
        )
        return Traits(
            lockstep=True, on_worker_loss="ends", one_host=True, needs_step=SEVERAL, lag="counted", lag_counts=counts
        )

    def __post_init__(self) -> None:
        refuse_unless(self.full_steps is None or self.full_steps >= 1, "full_steps", self.full_steps, ">= 1")
        refuse_unless(self.inner_steps is None or self.inner_steps >= 1, "inner_steps", self.inner_steps, ">= 1")

    def setup(self, w: Worker) -> None:
        """u, shared, and the numbers of its updates; u^, the model's own; u0 and mu; the first step of the epoch.

        Every worker's sum for mu, shared.
        """
        self.u = shared_weights(w)
        self.updates = UpdateCounts(w)
        self.slices = replica_slices(w.ops, w.flat, self.rule, self.u)
        self.read = [group.weights for group in w.flat.groups]
        self.origin, self.mu, self.at_origin = ([torch.zeros_like(x) for x in self.read] for _ in range(3))
        self.sums = [_sums(w, rank) for rank in w.workers]
        self.counts = [w.shared(f"svrg.count{rank}", torch.zeros(1, dtype=torch.int64)) for rank in w.workers]
        self.me = w.workers.index(w.rank)
        self.collective = collective("auto", w.transport, w.workers)
        self.full, self.inner = self._phases(w)
        self.began = w.step

    def _phases(self, w: Worker) -> tuple[int, int]:
        """The numbers of full and of inner steps of an epoch."""
        pass_steps = UNCOUNTED if w.data_size is None else math.ceil(w.data_size / (len(w.workers) * w.batch_size))
        full = self.full_steps or pass_steps
        return full, self.inner_steps or 2 * full

    def step(self, w: Worker, batch: Batch) -> float:
        """A full step or an inner step."""
        position = (w.step - self.began) % (self.full + self.inner)
        if position == 0:
            self._begin(w)
        if position < self.full:
            return self._add_to_mu(w, batch)
        if position == self.full:
            self._complete_mu(w)
        return self._descend(w, batch)

    def _begin(self, w: Worker) -> None:
        """u0 <- u, once all writes to u are done."""
        self.collective.barrier()
        read(w, self.u)
        for origin, x, total in zip(self.origin, self.read, self.sums[self.me], strict=True):
            w.ops.copy(x, origin)
            w.ops.zero(total)
        self.counts[self.me].zero_()

    def _add_to_mu(self, w: Worker, batch: Batch) -> float:
        """Add the gradient at u0 times the number of samples."""
        loss = w.gradient(batch)
        samples = len(batch[0]) if batch else w.batch_size
        for group, total in zip(w.flat.groups, self.sums[self.me], strict=True):
            w.ops.add(total, group.grad, scale=samples)
        self.counts[self.me].add_(samples)
        return loss

    def _complete_mu(self, w: Worker) -> None:
        """mu = (1/n) sum of all workers' sums, in rank order, once all are complete."""
        self.collective.barrier()
        n = sum(self.counts[1:], self.counts[0])
        for number, mu in enumerate(self.mu):
            w.ops.zero(mu)
            for sums in self.sums:
                w.ops.add(mu, sums[number])
            w.ops.divide(mu, n)

    def _descend(self, w: Worker, batch: Batch) -> float:
        """u <- u - eta v. Both gradients are of the same mini-batch and, by the same seed, with the same dropout."""
        with _unchanged(w.model.buffers()):
            w.flat.move_to(self.origin)
            w.gradient(batch)
        for g, group in zip(self.at_origin, w.flat.groups, strict=True):
            w.ops.copy(group.grad, g)
        w.flat.move_to(self.read)
        self.updates.read()
        read(w, self.u)
        loss = w.gradient(batch)
        for number, (group, weight_slice) in enumerate(zip(w.flat.groups, self.slices, strict=True)):
            v = w.ops.add(group.grad, self.at_origin[number], scale=-1)
            w.ops.add(v, self.mu[number])
            weight_slice.update(v, UpdateContext(weight_slice.weights, samples=w.samples), self._untouched(w, number))
        w.lag = self.updates.written()
        return loss

    def _untouched(self, w: Worker, number: int) -> frozenset[int]:
        """The parameters of a dtype group that neither this mini-batch nor any of mu has touched."""
        skipped = w.flat.groups[number].untouched()
        spans = {one.param_id: one.span for one in w.flat.groups[number].slots if one.param_id in skipped}
        return frozenset(m for m, span in spans.items() if not self.mu[number][span.start : span.stop].any())

    def finish(self, w: Worker) -> None:
        """The last epoch may be incomplete; wait until all writes to u are done."""
        self.collective.barrier()

    def answer(self, w: Worker) -> Weights | None:
        """u, once all workers have stopped writing."""
        return None if gather(w) is None else w.named(self.u)

    # -- checkpoints ------------------------------------------------------------------------------

    def _epoch(self, w: Worker) -> Tensor:
        """The terms of the epoch in progress, and the position in it."""
        return torch.tensor([len(w.workers), w.batch_size, self.full, self.inner, w.step - self.began])

    def declared_state(self, w: Worker) -> StateParts:
        """u0, mu and the epoch; of each worker its sum and the state of its rule."""
        slots = w.flat.slots
        return {
            "rule": RuleState(slots, self.slices, "own"),
            "sum": VectorState(slots, self.sums[self.me]),
            "count": CustomState("own", lambda: {"": self.counts[self.me]}, self._load_count),
            "u0": VectorState(slots, self.origin, "shared"),
            "mu": VectorState(slots, self.mu, "shared"),
            "epoch": CustomState("shared", lambda: {"": self._epoch(w)}, partial(self._continue_epoch, w)),
        }

    def _load_count(self, saved: Sequence[Saved]) -> None:
        for one in saved:
            self.counts[self.me].copy_(one[""])

    def _continue_epoch(self, w: Worker, saved: Sequence[Saved]) -> None:
        """Continue the epoch if its terms are the same; otherwise a new one begins and overwrites u0, mu and sums."""
        *terms, position = saved[0][""].tolist()
        if terms == self._epoch(w)[:-1].tolist():
            self.began = w.step - position


def _sums(w: Worker, rank: int) -> list[Tensor]:
    """The shared memory of a worker's sum, one tensor per dtype group."""
    weights = [group.weights for group in w.flat.groups]
    return [w.shared(f"svrg.sum{rank}.{n}", x) for n, x in enumerate(weights)]


@contextmanager
def _unchanged(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Restore these tensors afterwards: the statistics of BatchNorm are to be those of u^, not of u0."""
    kept = [(x, x.clone()) for x in tensors]
    yield
    for x, copy in kept:
        x.copy_(copy)
