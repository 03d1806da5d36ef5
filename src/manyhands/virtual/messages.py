"""Messages and lanes of the virtual world: lending and credit, checked."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from torch import Tensor

from manyhands.core.errors import ChangedInFlight
from manyhands.core.lending import Seal
from manyhands.core.protocols import Meta, Tag
from manyhands.virtual.kernel import Activity, Kernel


class Lane:
    """All messages of one kind from one rank to another: how many are out, and who waits to send."""

    __slots__ = ("blocked", "last", "out")

    def __init__(self) -> None:
        self.out = 0
        self.blocked: deque[Activity] = deque()
        self.last: VirtualMessage | None = None

    def give_back(self, kernel: Kernel) -> None:
        """One message was released: the next sender may go on."""
        self.out -= 1
        if self.blocked:
            kernel.wake(self.blocked.popleft())


class VirtualMessage:
    """A message that lends real tensors in virtual time."""

    __slots__ = (
        "_kernel",
        "_seals",
        "depth",
        "frm",
        "lane",
        "meta",
        "nbytes",
        "received",
        "released",
        "tag",
        "tensors",
    )

    def __init__(
        self, kernel: Kernel, lane: Lane, frm: int, tag: Tag, meta: Meta, tensors: Sequence[Tensor], depth: int
    ) -> None:
        self._kernel = kernel
        self.lane = lane
        self.frm = frm
        self.depth = depth
        self.received = False
        self.released = False
        self.load(tag, meta, tensors)

    def load(self, tag: Tag, meta: Meta, tensors: Sequence[Tensor]) -> None:
        """Fill the message; a later one may replace an unread one. What travels has no history."""
        self.tag = tag
        self.meta = meta
        self.tensors = tuple([x.detach() for x in tensors]) if tensors else ()
        self.nbytes = sum([x.nbytes for x in self.tensors]) if tensors else 0
        self._seals = [Seal(x) for x in tensors if not x.is_meta]

    def release(self) -> None:
        """Give the tensors and the credit back."""
        if not self.released:
            self.released = True
            self.lane.give_back(self._kernel)
            for seal in self._seals:
                if seal.broken():
                    raise ChangedInFlight(self.frm, self.tag)

    def keep(self) -> tuple[Tensor, ...]:
        """Copy, then release."""
        copies = tuple(x.clone() for x in self.tensors)
        self.release()
        return copies
