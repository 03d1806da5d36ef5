"""Slice passes: what one member of a team of slices does around its forward and backward passes.

share      the owners send the parameters that are not divided
within     layers compute with slices; the passes run where they may wait (core/pass_thread.py)
finish     the gradients of copies are dropped
"""

from __future__ import annotations

from manyhands.core.errors import Refused
from manyhands.core.port import Transport
from manyhands.core.task import Task
from manyhands.core.worker import Worker
from manyhands.splits.owned_parameters import OwnedParameters, SlicePart
from manyhands.splits.slice_exchange import SliceExchange
from manyhands.splits.slice_layers import SliceLayers


class SlicePasses:
    """Connects the slices of this rank with those of the other members.

    Args:
        w: this rank, whose flat model has the part.
        members: the ranks of the team.
        part: what this rank trains.
    """

    def __init__(self, w: Worker, members: Transport, part: SlicePart) -> None:
        refuse_task(w.task)
        self.exchange = SliceExchange(members, w.wait_in_passes())
        self.layers = SliceLayers(part.layers, self.exchange)
        """A context."""
        self._owned = OwnedParameters(w, part, self.exchange)

    def share(self) -> None:
        """Before the passes of a step."""
        self._owned.share()

    def finish(self, loss: float) -> None:
        """After the passes of a step, whose loss this is."""
        self._owned.finish(loss)


def refuse_task(task: Task) -> None:
    """Refuse a task that slices cannot train."""
    if task.gradient is not None or task.sizes_only:
        raise Refused("slices need a task with a loss function and real data")
