"""SharedMemory: one vector of weights for all workers of a host, read and written without locks.

split  data        when  never                  who  everyone, through one memory
what   nothing is sent                          how   any Rule, straight into the shared weights

    read w, compute g on it                    others write meanwhile
    w_v <- w_v - eta g_v  for v in the support

Two workers that write the same number at once may lose one of the writes; that is part of the method.
Parameters that a mini-batch did not touch are not written. A rule's memory is each worker's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from manyhands.core.gather import gather
from manyhands.core.holding import replica
from manyhands.core.protocols import At, Batch, Rule, Saved, Weights
from manyhands.core.saving import collect, join, own, pieces, restore, section, under
from manyhands.core.worker import Worker


@dataclass
class SharedMemory:
    """Lock-free training on one host.

    Args:
        rule: how a gradient is applied.
    """

    rule: Rule
    lockstep: ClassVar[bool] = False
    one_host: ClassVar[bool] = True

    def setup(self, w: Worker) -> None:
        """The shared weights, filled by whoever comes first; each worker's rule with its own memory."""
        t = w.transport
        if not w.flat.is_meta:
            with t.lock("weights"), torch.no_grad():
                filled = t.shared("filled", 1, torch.uint8)
                memory = [
                    t.shared(f"weights{n}", p.weights.numel(), p.weights.dtype) for n, p in enumerate(w.flat.parts)
                ]
                if not filled.item():
                    for shared, part in zip(memory, w.flat.parts, strict=True):
                        shared.copy_(part.weights)
                    filled.fill_(1)
            w.flat.move_to(memory)
        self.held = replica(w.flat, self.rule)

    def step(self, w: Worker, batch: Batch) -> float:
        """Compute on whatever the weights are, write without asking."""
        loss = w.gradient(batch)
        for part, held in zip(w.flat.parts, self.held, strict=True):
            w.move(2 * part.weights.nbytes)
            held.update(part.grad, At(held.weights, samples=w.samples), part.untouched())
        return loss

    def answer(self, w: Worker) -> Weights | None:
        """The shared weights, once everyone has stopped writing."""
        return None if gather(w) is None else w.named()

    def state(self, w: Worker) -> Saved | None:
        """What each worker's rule remembers."""
        return collect(w, under("rule", join(pieces(self.held, w.flat.places))))

    def restore(self, w: Worker, saved: Saved) -> None:
        """Each its own; a new worker's rule begins fresh."""
        if mine := own(w, saved):
            restore(self.held, w.flat.places, section(mine, "rule"))
