"""SharedMemory: one vector of weights for all workers of a host, read and written without locks.

split  data        when  never                  who  everyone, through one memory
what   nothing is sent                          how   any Rule, straight into the shared weights

    read w, compute g on it                    others write meanwhile
    w_v <- w_v - eta g_v  for v in the support

Two workers that write the same number at once may lose one of the writes; that is part of the method.
Parameters that a mini-batch did not touch are not written, and of a sparse gradient only its rows: workers whose
samples have nothing in common then do not meet at all. Only plain SGD and Adagrad can do that; with a rule whose memory
fades, or that decays, every update moves all rows, so there sparse gradients are made dense. A rule's memory is each
worker's own.

A model that knows which weights a mini-batch touches (`Descends`) writes them itself, if the rule is plain SGD:

    read w_v for v in the support, compute g_v          others write meanwhile
    w_v <- w_v - eta g_v, sample by sample              one update per mini-batch, but others may see half of it

That is the same update, rounded differently where two samples share a v, without anything of the size of the model.

With `snapshot` a worker copies the weights before it computes. It then sees one w from the first layer to the last and
back, and reads what others write (which is slow, for their caches hold it) once per mini-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from manyhands.core.flat import Part
from manyhands.core.gather import gather
from manyhands.core.holding import Holding, replica, scales, skips
from manyhands.core.protocols import At, Batch, Rule, Saved, Weights
from manyhands.core.saving import collect, join, own, pieces, restore, section, under
from manyhands.core.worker import Worker
from manyhands.topology.common import common_weights, read


@dataclass
class SharedMemory:
    """Lock-free training on one host.

    Args:
        rule: how a gradient is applied.
        snapshot: compute on a private copy of the weights.
    """

    rule: Rule
    snapshot: bool = False
    lockstep: ClassVar[bool] = False
    one_host: ClassVar[bool] = True

    def setup(self, w: Worker) -> None:
        """The shared weights; the model's own are the same, or a copy; each worker's rule with its own memory."""
        self.weights = common_weights(w)
        if not self.snapshot:
            w.flat.move_to(self.weights)
        self.held = replica(w.flat, self.rule, self.weights)
        if all(skips(held.rule) for held in self.held):
            w.flat.keep_rows()
        is_plain = len(self.held) == 1 and scales(self.held[0].rule)
        self.descends = is_plain and not self.snapshot and w.descends is not None

    @property
    def welcomes(self) -> bool:
        """Whoever shares the memory is welcome."""
        return True

    def arrive(self, w: Worker) -> None:
        """The weights are where they are."""

    def step(self, w: Worker, batch: Batch) -> float:
        """Compute on whatever the weights are, write without asking."""
        if self.descends and not getattr(batch, "names", ()):  # what has names the model must sort out
            return self.descend(w, batch)
        if self.snapshot:
            read(w, self.weights)
        loss = w.gradient(batch)
        for part, held in zip(w.flat.parts, self.held, strict=True):
            self.write(w, part, held)
        return loss

    def write(self, w: Worker, part: Part, held: Holding) -> None:
        """Move the weights by a gradient: all that is dense, and the rows of what is sparse."""
        rows = w.flat.rows
        sparse = [place for place in part.places if place.mark in rows] if rows else []
        skipped = sum(place.span.numel - rows[place.mark].values().numel() for place in sparse)
        w.move(2 * (part.weights.nbytes - skipped * part.weights.element_size()))
        untouched = part.untouched().union(place.mark for place in sparse)
        held.update(part.grad, At(held.weights, samples=w.samples), untouched)
        for place in sparse:
            held.update_rows(place.mark, rows[place.mark], At(held.weights, samples=w.samples))

    def descend(self, w: Worker, batch: Batch) -> float:
        """The same by a model that writes its gradient itself."""
        (held,) = self.held
        loss, step = w.descent(batch)
        w.move(2 * step.touches * held.weights.element_size())
        held.let(step.write, At(held.weights, samples=w.samples))
        return loss

    def answer(self, w: Worker) -> Weights | None:
        """The shared weights, once everyone has stopped writing."""
        return None if gather(w) is None else w.named(self.weights)

    def state(self, w: Worker) -> Saved | None:
        """What each worker's rule remembers."""
        return collect(w, under("rule", join(pieces(self.held, w.flat.places))))

    def restore(self, w: Worker, saved: Saved) -> None:
        """Each its own; a new worker's rule begins fresh."""
        if mine := own(w, saved):
            restore(self.held, w.flat.places, section(mine, "rule"))
