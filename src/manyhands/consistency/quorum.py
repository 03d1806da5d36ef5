"""Quorum: an update needs the gradients of some workers, not of all.

            accept               ready               admit             known as
fresh       lag = 0, not again   min(k, alive)       not waiting       backup workers, K-sync
  and any   lag = 0              min(k, alive)       yes               K-batch-sync
stale       not again            min(k, alive)       not waiting       K-async
  and any   yes                  min(k, alive)       yes               K-batch-async, softsync

A gradient that is not accepted is dropped; its worker reads and continues. If it matters which workers' gradients make
an update, the first shard selects them, and the others apply those of the same workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import ClassVar, Literal

from manyhands.core.consistency import Consistency, WorkerClock
from manyhands.core.errors import refuse_unless


@dataclass(frozen=True)
class Quorum:
    """An update of k gradients: k = (workers - spare) // parts, if it is not given.

    Args:
        k: how many gradients make an update.
        spare: how many workers are not waited for.
        parts: how many updates share the gradients of one step of all workers.
        fresh: whether a gradient must have been computed at the newest weights.
        distinct: whether a worker has at most one gradient in an update, and waits until it is applied.
    """

    k: int | None = None
    spare: int = 0
    parts: int = 1
    fresh: bool = False
    distinct: bool = True
    merges: ClassVar[bool] = True
    bounds_clocks: ClassVar[bool] = False
    tolerates_loss: ClassVar[bool] = True

    def __post_init__(self) -> None:
        refuse_unless(self.k is None or self.k >= 1, "k", self.k, ">= 1")
        refuse_unless(self.spare >= 0, "the number of backup workers", self.spare, ">= 0")
        refuse_unless(self.parts >= 1, "parts", self.parts, ">= 1")

    @property
    def scope(self) -> Literal["shard", "job"]:
        """ "job" if it matters which workers' gradients make an update."""
        return "job" if self.fresh or self.distinct else "shard"

    def among(self, workers: int) -> Quorum:
        """With k for this number of workers."""
        refuse_unless(self.k is None or self.k <= workers, "k", self.k, f"<= {workers}, the number of workers")
        backups = "the number of backup workers"
        refuse_unless(self.spare < workers, backups, self.spare, f"< {workers}, the number of workers")
        k = self.k or (workers - self.spare) // self.parts
        return replace(self, k=max(1, k))

    def accept(self, lag: int, again: bool) -> bool:
        """Drops stale gradients if `fresh`, and a second one of a worker if `distinct`."""
        return not (self.fresh and lag) and not (self.distinct and again)

    def most(self, workers: int) -> int:
        """One of each worker, or k of any workers."""
        return workers if self.distinct else self.k or workers

    def ready(self, pending: int, alive: int) -> bool:
        """Whether k gradients are pending, or one of each worker that is alive."""
        return pending >= max(1, min(self.k or alive, alive))

    def admit(self, me: WorkerClock) -> bool:
        """Whether this worker's gradient has been applied, if `distinct`; else always."""
        return not (self.distinct and me.waiting)


EXAMPLES: Mapping[str, Consistency] = {
    f"quorum({k}{', fresh' * fresh}{', distinct' * distinct})": Quorum(k, fresh=fresh, distinct=distinct)
    for k, fresh, distinct in product((1, 2), (True, False), (True, False))
}
