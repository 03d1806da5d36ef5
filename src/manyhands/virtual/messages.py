"""Messages and channels of the virtual world, with credit and a check for writes into tensors in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from torch import Tensor

from manyhands.core.errors import ChangedInFlight
from manyhands.core.port import Meta, Tag
from manyhands.core.send_guard import SendGuard
from manyhands.virtual.kernel import Kernel, VirtualActivity


class VirtualChannel:
    """The messages of one tag name from one rank to another: how many are in flight, and the blocked senders."""

    __slots__ = ("blocked", "in_flight", "last")

    def __init__(self) -> None:
        self.in_flight = 0
        self.blocked: deque[VirtualActivity] = deque()
        self.last: VirtualMessage | None = None

    def release(self, kernel: Kernel) -> None:
        """One message was released: wake the next activity that waits for credit."""
        self.in_flight -= 1
        if self.blocked:
            kernel.wake(self.blocked.popleft())


class VirtualMessage:
    """A message with real tensors, sent in virtual time."""

    __slots__ = (
        "_guards",
        "_kernel",
        "channel",
        "depth",
        "frm",
        "meta",
        "nbytes",
        "received",
        "released",
        "tag",
        "tensors",
    )

    def __init__(
        self,
        kernel: Kernel,
        channel: VirtualChannel,
        frm: int,
        tag: Tag,
        meta: Meta,
        tensors: Sequence[Tensor],
        depth: int,
    ) -> None:
        self._kernel = kernel
        self.channel = channel
        self.frm = frm
        self.depth = depth
        self.received = False
        self.released = False
        self.load(tag, meta, tensors)

    def load(self, tag: Tag, meta: Meta, tensors: Sequence[Tensor]) -> None:
        """Set the contents, also to replace those of an unread message. Tensors lose their autograd history."""
        self.tag = tag
        self.meta = meta
        self.tensors = tuple([x.detach() for x in tensors]) if tensors else ()
        self.nbytes = sum([x.nbytes for x in self.tensors]) if tensors else 0
        self._guards = [SendGuard(x) for x in tensors if not x.is_meta]

    def release(self) -> None:
        """Give the tensors and the credit back to the sender; a second call does nothing."""
        if not self.released:
            self.released = True
            self.channel.release(self._kernel)
            for guard in self._guards:
                if guard.broken():
                    raise ChangedInFlight(self.frm, self.tag)

    def keep(self) -> tuple[Tensor, ...]:
        """Copy the tensors, release the message, return the copies."""
        copies = tuple(x.clone() for x in self.tensors)
        self.release()
        return copies
