"""Team: several ranks that hold one replica of the model together and compute one gradient.

              part 0      part 1
   team 0     rank 0      rank 1         rows: a team computes one gradient
   team 1     rank 2      rank 3         columns: the ranks that train the same part of the model
   team 2     rank 4      rank 5

A data-parallel method that runs in every column trains the whole model (strategies/grid.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from manyhands.core.port import Transport
from manyhands.core.strategy import Batch, Strategy

if TYPE_CHECKING:
    from manyhands.core.worker import Worker

Origin = tuple[int, int, int]
"""What the random numbers of a gradient depend on: a worker, its step and a key."""


class Team(Protocol):
    """A way in which several ranks compute one gradient; every rank has an object of its own.

    All members make the same calls in the same order. Together their parts have every trained parameter once.
    """

    @property
    def size(self) -> int:
        """How many ranks form a team; 0: all workers form one."""

    def settle(self, w: Worker, size: int) -> Mapping[str, Any]:
        """Before `part`, on all ranks of a run: determine what the model alone does not; facts for the record."""

    def check(self, size: int, batch_size: int, model: nn.Module) -> None:
        """Refuse a model or a mini-batch that `size` ranks cannot divide."""

    def part(self, model: nn.Module, index: int, size: int) -> nn.Module:
        """What the member with this index trains."""

    def begin(self, w: Worker, members: Transport) -> None:
        """Set up, and become `w.team`; `w` has the part in its flat model, `members` are the ranks of this team.

        A team of one may leave `w.team` as it is: then the rank computes alone.
        """

    def gradient(self, w: Worker, batch: Batch, origin: Origin) -> float:
        """Compute the loss of a mini-batch, which every member returns, and leave the part's gradient in `w.flat`."""


def team_size(strategy: Strategy, transport: Transport) -> int:
    """How many consecutive ranks hold one replica of the model in this job."""
    workers = transport.roles.count("worker") - len(transport.pending_ranks)
    return workers // strategy.replicas(workers)


def release_untrained(w: Worker) -> None:
    """Free the memory of the parameters that other ranks train; their names and shapes remain, each a view of one NaN.

    So that reading them by mistake is noticed. A model of sizes only has no memory.
    """
    if w.trained is w.model or w.task.sizes_only:
        return
    own = {id(p) for p in w.trained.parameters()}
    for p in w.model.parameters():
        if id(p) not in own and p.requires_grad:
            p.data = p.data.new_full((1,), float("nan")).expand(p.shape)
