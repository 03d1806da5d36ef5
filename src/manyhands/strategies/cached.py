"""Cached: a worker reads the server only when its last read is too old; it applies its own updates at once.

    at clock c    if c - (slowest clock at the last read) > s:  read        else: what was read, plus own updates since
                  g = gradient(p);  p <- p + rule(g);  push g

A read contains what all workers have pushed, also this worker's own updates, since it asks after it has pushed. So no
update is counted twice, and none of its own is ever missing. Updates must add up for that: the rule has no memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from manyhands.consistency import Stale
from manyhands.core.errors import Refused
from manyhands.core.rule import UpdateContext
from manyhands.core.weight_slice import replica_slices
from manyhands.core.worker import Worker
from manyhands.strategies.server import Server


@dataclass
class Cached(Server):
    """A parameter server whose workers reuse a read for as long as it is fresh enough; the knobs are a `Server`'s."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.when, Stale):
            raise Refused(f"{self.when} does not bound how old a read may be: a cache needs stale(s)")
        if "owner" in self.rule.needs or "seen" in self.rule.needs or self.rule.init(torch.zeros(1)):
            raise Refused(
                f"{self.rule} has a memory, but the updates of a worker add up only with a rule that has none"
            )
        if self.groups:
            raise Refused(f"groups is {self.groups}, but must be 0 with a cache: it needs the clock of its own worker")
        self.staleness = self.when.staleness

    def setup(self, w: Worker) -> None:
        """Besides the clients: this worker's clock, the slowest clock at its last read, and its own updates."""
        self.clock = self.read_at = 0
        self.own = replica_slices(w.ops, w.flat, self.rule)
        super().setup(w)
        self.simple = False  # a pushed gradient may still be lent when the next one is computed

    def join_running(self, w: Worker) -> None:
        """Nothing was read yet, so the first pull must read."""
        self.read_at = -1 - self.staleness
        super().join_running(w)

    def _pull(self, w: Worker) -> None:
        """Read only if the last read is too old."""
        if self.clock - self.read_at > self.staleness:
            super()._pull(w)
            self.read_at = self.clock - max([client.ahead for client in self.clients])
        self.ahead = self.clock - self.read_at

    def _push(self, w: Worker) -> None:
        """The weights contain this worker's own updates already: later gradients count as computed after them."""
        super()._push(w)
        for client in self.clients:
            client.version += 1

    def _accrue(self, w: Worker) -> None:
        """Apply this worker's own update at once."""
        super()._accrue(w)
        self.clock += 1
        untouched = w.flat.untouched()
        for weight_slice, group in zip(self.own, w.flat.groups, strict=True):
            at = UpdateContext(group.weights, samples=w.samples, workers=len(w.workers))
            weight_slice.update(group.grad, at, untouched)

    def _begin_again(self, w: Worker) -> None:
        """All workers begin at clock 0 with a read."""
        self.clock, self.read_at = 0, -1 - self.staleness
        super()._begin_again(w)
