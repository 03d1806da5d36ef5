"""Consistency: when do workers agree? The questions that a server shard asks before it applies or serves weights."""

from __future__ import annotations

from typing import ClassVar, Literal, NamedTuple, Protocol, runtime_checkable


class WorkerClock(NamedTuple):
    """The clock of a worker at a shard when it asks to read, and what it is compared with."""

    clock: int
    slowest: int
    version: int
    waiting: bool
    """Whether a gradient of this worker is still pending."""


WAITING = WorkerClock(clock=0, slowest=0, version=0, waiting=True)
"""The clock of a worker whose gradient has not been applied yet."""


class Consistency(Protocol):
    """When do workers agree? A few yes/no questions that a shard asks; `OPTIONAL` lists those that only some answer."""

    merges: ClassVar[bool]
    """Whether pending gradients make one update (their mean) or one update each."""
    bounds_clocks: ClassVar[bool]
    """Whether it bounds by how many clocks a worker is ahead of the slowest, by its knob `staleness`."""
    tolerates_loss: ClassVar[bool]
    """Whether a run continues after a worker is lost."""

    @property
    def scope(self) -> Literal["shard", "job"]:
        """Whether each shard selects the gradients of an update itself, or the first shard does for all of them."""

    def ready(self, pending: int, alive: int) -> bool:
        """May the pending gradients be applied? `alive` counts the workers that may push one."""

    def admit(self, me: WorkerClock) -> bool:
        """May this worker read now?"""


OPTIONAL = {
    "among": "Picks: the same consistency for a given number of workers",
    "accept": "Picks: whether a gradient is accepted or dropped",
    "most": "Picks: the largest number of pending gradients",
}
"""The methods that only some consistencies have. A contract test refuses a public name that is in neither list."""


@runtime_checkable
class Picks(Protocol):
    """A consistency that depends on the number of workers and may drop gradients."""

    def among(self, workers: int) -> Consistency:
        """The same consistency for that many workers; refused if it is impossible with them."""

    def accept(self, lag: int, again: bool) -> bool:
        """Is a gradient of this staleness accepted? `again`: its worker already has one pending."""

    def most(self, workers: int) -> int:
        """The largest number of gradients that may be pending."""
