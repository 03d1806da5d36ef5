"""Quorum: an update needs the gradients of some, not of all.

            accept               ready               admit             known as
fresh       lag = 0, not again   min(k, alive)       not waiting       backup workers, K-sync
  and any   lag = 0              min(k, alive)       yes               K-batch-sync
late        not again            min(k, alive)       not waiting       K-async
  and any   yes                  min(k, alive)       yes               K-batch-async, softsync

What is not accepted is dropped; its worker reads and goes on. Where it matters whose gradients make an update, the
first shard decides, and the others apply those of the same workers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from manyhands.core.errors import refuse_unless
from manyhands.core.protocols import Standing


@dataclass(frozen=True)
class Quorum:
    """An update of k gradients: k = (workers - spare) // parts, if it is not given.

    Args:
        k: how many gradients make an update.
        spare: how many workers are not waited for.
        parts: how many updates share the gradients that all workers bring in one step each.
        fresh: whether a gradient must have been computed at the newest weights.
        distinct: whether a worker has only one gradient in an update, and waits for it to be applied.
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
        """Only if all gradients are alike, any of them will do."""
        return "job" if self.fresh or self.distinct else "shard"

    def among(self, workers: int) -> Quorum:
        """How many that are, of so many workers."""
        refuse_unless(self.k is None or self.k <= workers, "k", self.k, f"<= {workers}, the number of workers")
        backups = "the number of backup workers"
        refuse_unless(self.spare < workers, backups, self.spare, f"< {workers}, the number of workers")
        k = self.k or (workers - self.spare) // self.parts
        return replace(self, k=max(1, k))

    def accept(self, lag: int, again: bool) -> bool:
        """Stale gradients, and second ones, may be dropped."""
        return not (self.fresh and lag) and not (self.distinct and again)

    def most(self, workers: int) -> int:
        """One of each worker, or k of whomever."""
        return workers if self.distinct else self.k or workers

    def ready(self, pending: int, alive: int) -> bool:
        """k are there, or as many as there can be."""
        return pending >= max(1, min(self.k or alive, alive))

    def admit(self, me: Standing) -> bool:
        """My gradient has been applied, if I may have only one."""
        return not (self.distinct and me.waiting)
