"""Svrg: lock-free steps whose noise is taken out by a full gradient, computed anew in every epoch.

split  data        when  twice per epoch, in between never       who  everyone, through one memory
what   nothing is sent                          how   any Rule, straight into the shared weights

    an epoch     u0 <- u                                                  all meet first: nobody writes any more
    full steps   sum_k <- sum_k + b grad f_B(u0)                          each worker over its own samples
                 mu = (1/n) sum_k sum_k                                   all meet first: mu is complete
    inner steps  v = grad f_B(u^) - grad f_B(u0) + mu;  u <- u - eta v    u^ read, u written without a lock

A step is one mini-batch: the first ones of an epoch make mu, and each of the others is computed on twice, at u0 and
then, as late as possible, at u^. With a pass for mu and two for the others an epoch consumes 3 n samples, as in the
paper.

Workers take equally many steps (M per thread in the paper): whoever met the others at a barrier of its own choosing
would wait for those who had no samples left. mu is the mean over the mini-batches of that many steps. If they divide a
worker's samples, that is the full gradient; else some of its samples count twice, or wait for the next epoch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from manyhands.core.errors import refuse_unless
from manyhands.core.gather import gather
from manyhands.core.holding import replica
from manyhands.core.protocols import At, Batch, Rule, Saved, Weights
from manyhands.core.saving import collect, join, named, own, pieces, place, restore, section, under
from manyhands.core.worker import Worker
from manyhands.topology.collectives.group import Group
from manyhands.topology.common import common_weights, read

UNCOUNTED = 4
"""Full steps of an epoch if nobody knows how many samples there are."""


@dataclass
class Svrg:
    """Asynchronous variance reduction on one host.

    Args:
        rule: how v is applied.
        full_steps: mini-batches per worker that mu is the mean of; None: as many as hold all samples.
        inner_steps: M, mini-batches per worker that follow; None: twice as many.
    """

    rule: Rule
    full_steps: int | None = None
    inner_steps: int | None = None
    lockstep: ClassVar[bool] = True
    one_host: ClassVar[bool] = True

    def __post_init__(self) -> None:
        refuse_unless(self.full_steps is None or self.full_steps >= 1, "full_steps", self.full_steps, ">= 1")
        refuse_unless(self.inner_steps is None or self.inner_steps >= 1, "inner_steps", self.inner_steps, ">= 1")

    def setup(self, w: Worker) -> None:
        """u, shared; u^, the model's own; u0 and mu; everyone's sums towards mu, shared; where the epoch began."""
        self.u = common_weights(w)
        self.held = replica(w.flat, self.rule, self.u)
        self.read = [part.weights for part in w.flat.parts]
        self.origin, self.mu, self.at_origin = ([torch.zeros_like(x) for x in self.read] for _ in range(3))
        self.sums = [_sums(w, rank) for rank in w.workers]
        self.counts = [_memory(w, f"count{rank}", 1, torch.int64) for rank in w.workers]
        self.me = w.workers.index(w.rank)
        self.group = Group(w.transport, w.workers, "svrg")
        self.full, self.inner = self.phases(w)
        self.began = w.step

    def phases(self, w: Worker) -> tuple[int, int]:
        """How many full and inner steps an epoch has."""
        pass_steps = UNCOUNTED if w.data_size is None else math.ceil(w.data_size / (len(w.workers) * w.batch_size))
        full = self.full_steps or pass_steps
        return full, self.inner_steps or 2 * full

    def step(self, w: Worker, batch: Batch) -> float:
        """One mini-batch of mu, or of the way down."""
        place = (w.step - self.began) % (self.full + self.inner)
        if place == 0:
            self.begin(w)
        if place < self.full:
            return self.add_to_mu(w, batch)
        if place == self.full:
            self.complete_mu(w)
        return self.descend(w, batch)

    def begin(self, w: Worker) -> None:
        """u0 <- u, once nobody writes any more."""
        self.group.meet()
        read(w, self.u)
        for origin, x, total in zip(self.origin, self.read, self.sums[self.me], strict=True):
            origin.copy_(x)
            total.zero_()
        self.counts[self.me].zero_()

    def add_to_mu(self, w: Worker, batch: Batch) -> float:
        """Add the gradient at u0, as often as there are samples."""
        loss = w.gradient(batch)
        samples = len(batch[0]) if batch else w.batch_size
        for part, total in zip(w.flat.parts, self.sums[self.me], strict=True):
            w.move(2 * total.nbytes)
            total.add_(part.grad, alpha=samples)
        self.counts[self.me].add_(samples)
        return loss

    def complete_mu(self, w: Worker) -> None:
        """mu = (1/n) sum of everyone's sums, in rank order, once all are there."""
        self.group.meet()
        n = sum(self.counts[1:], self.counts[0])
        for number, mu in enumerate(self.mu):
            mu.zero_()
            for sums in self.sums:
                w.move(mu.nbytes)
                mu.add_(sums[number])
            mu.div_(n)

    def descend(self, w: Worker, batch: Batch) -> float:
        """u <- u - eta v. Both gradients see the same mini-batch and, by the same seed, the same dropout."""
        with _as_they_were(w.model.buffers()):
            w.flat.move_to(self.origin)
            w.gradient(batch)
        for g, part in zip(self.at_origin, w.flat.parts, strict=True):
            g.copy_(part.grad)
        w.flat.move_to(self.read)
        read(w, self.u)
        loss = w.gradient(batch)
        for number, (part, held) in enumerate(zip(w.flat.parts, self.held, strict=True)):
            w.move(5 * part.grad.nbytes)
            v = part.grad.sub_(self.at_origin[number]).add_(self.mu[number])
            held.update(v, At(held.weights, samples=w.samples), self.untouched(w, number))
        return loss

    def untouched(self, w: Worker, number: int) -> frozenset[int]:
        """The parameters of a part that neither this mini-batch nor any of mu has touched."""
        skipped = w.flat.parts[number].untouched()
        spans = {one.mark: one.span for one in w.flat.parts[number].places if one.mark in skipped}
        return frozenset(m for m, span in spans.items() if not self.mu[number][span.start : span.stop].any())

    def finish(self, w: Worker) -> None:
        """The last epoch ends where it is; all are needed for it too."""
        self.group.meet()

    def answer(self, w: Worker) -> Weights | None:
        """u, once everyone has stopped writing."""
        return None if gather(w) is None else w.named(self.u)

    # -- checkpoints ------------------------------------------------------------------------------

    def epoch(self, w: Worker) -> Tensor:
        """What an epoch in progress depends on, and how far it has come."""
        return torch.tensor([len(w.workers), w.batch_size, self.full, self.inner, w.step - self.began])

    def state(self, w: Worker) -> Saved | None:
        """u0, mu and the epoch; of each worker its sums and what its rule remembers."""
        places = w.flat.places
        mine = under("sum", named(places, self.sums[self.me])) | {"count": self.counts[self.me]}
        saved = collect(w, mine | under("rule", join(pieces(self.held, places))), of_all=True)
        if saved is None:
            return None
        return (
            saved
            | under("u0", named(places, self.origin))
            | under("mu", named(places, self.mu))
            | {"epoch": self.epoch(w)}
        )

    def restore(self, w: Worker, saved: Saved) -> None:
        """Go on with the epoch if it is the same for everyone; otherwise begin one."""
        mine, places = own(w, saved), w.flat.places
        if mine:
            restore(self.held, places, section(mine, "rule"))
        *terms, far = saved["epoch"].tolist()
        if terms == self.epoch(w)[:-1].tolist() and mine:
            self.began = w.step - far
            for vectors, name in ((self.origin, "u0"), (self.mu, "mu")):
                place(places, vectors, section(saved, name))
            place(places, self.sums[self.me], section(mine, "sum"))
            self.counts[self.me].copy_(mine["count"])


def _sums(w: Worker, rank: int) -> list[Tensor]:
    """Where a worker adds up its gradients, one tensor per part of the model."""
    weights = [part.weights for part in w.flat.parts]
    return [_memory(w, f"sum{rank}.{n}", x.numel(), x.dtype) for n, x in enumerate(weights)]


def _memory(w: Worker, name: str, numel: int, dtype: torch.dtype) -> Tensor:
    if w.flat.is_meta:
        return torch.zeros(numel, dtype=dtype, device="meta")
    return w.transport.shared(f"svrg.{name}", numel, dtype)


@contextmanager
def _as_they_were(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Undo what is done to these: BatchNorm's statistics are those of u^, not of u0."""
    kept = [(x, x.clone()) for x in tensors]
    yield
    for x, copy in kept:
        x.copy_(copy)
