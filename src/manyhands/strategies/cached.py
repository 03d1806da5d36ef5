"""Cached: a worker reads the server only when what it has read is too old; its own updates it sees at once.

    at clock c    if c - (slowest clock at the last read) > s:  read        else: what was read, plus own updates since
                  g = gradient(p);  p <- p + rule(g);  push g

A read takes in what all have pushed, this worker's own updates among them, since it asks after it has pushed. So
nothing is counted twice, and nothing of its own is ever missing. That needs updates that add up: a rule without memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from manyhands.consistency import Stale
from manyhands.core.errors import Refused
from manyhands.core.holding import replica
from manyhands.core.protocols import At
from manyhands.core.worker import Worker
from manyhands.strategies.server import Server


@dataclass
class Cached(Server):
    """A parameter server whose workers keep what they have read for as long as they may; the knobs are a `Server`'s."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.when, Stale):
            raise Refused(f"{self.when} does not say how old a read may be: only stale(s) goes with a cache")
        if "owner" in self.rule.needs or "seen" in self.rule.needs or self.rule.init(torch.zeros(1)):
            raise Refused(f"{self.rule} has a memory, but a worker can add up its own updates only with a rule without")
        if self.groups:
            raise Refused(f"groups is {self.groups}, but must be 0 with a cache: it needs its worker's own clock")
        self.staleness = self.when.staleness

    def setup(self, w: Worker) -> None:
        """Beside the lanes: which clock it is, which the slowest clock was when we read, and our own updates."""
        self.clock = self.read_at = 0
        self.own = replica(w.flat, self.rule)
        super().setup(w)
        self.simple = False  # a gradient may still be on its way when the next one is computed

    def arrive(self, w: Worker) -> None:
        """Nothing has been read yet."""
        self.read_at = -1 - self.staleness
        super().arrive(w)

    def pull(self, w: Worker) -> None:
        """Read only if the last read is too old."""
        w.lag = self.clock - self.read_at
        if w.lag > self.staleness:
            super().pull(w)
            self.read_at = self.clock - w.lag

    def accrue(self, w: Worker) -> None:
        """See the own update at once."""
        super().accrue(w)
        self.clock += 1
        untouched, workers = w.flat.untouched(), len(w.workers)
        samples = self.clock * workers * w.batch_size
        for held, part in zip(self.own, w.flat.parts, strict=True):
            held.update(part.grad, At(part.weights, samples=samples, workers=workers), untouched)

    def begin_again(self, w: Worker) -> None:
        """All begin at clock 0, and read."""
        self.clock, self.read_at = 0, -1 - self.staleness
        super().begin_again(w)
