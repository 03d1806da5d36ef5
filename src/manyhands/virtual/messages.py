"""Messages and lanes of the virtual world: lending and credit, checked.

A tensor that was sent belongs to its receiver until released. Here the sender could still write into
it, and nothing would tell; so a message remembers the tensor's version when it was sent. Views share
one version with their base, so for them the content is remembered too, as a checksum.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from manyhands.core.errors import ChangedInFlight
from manyhands.core.protocols import Meta, Tag
from manyhands.virtual.kernel import Activity, Kernel


def _checksum(x: Tensor) -> int:
    return zlib.crc32(memoryview(x.detach().reshape(-1).contiguous().view(torch.uint8).numpy()))  # type: ignore[arg-type]


class Seal:
    """What a lent tensor looked like."""

    __slots__ = ("_checksum", "_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._version = tensor._version
        view = tensor._base is not None or tensor.untyped_storage().nbytes() != tensor.nbytes
        self._checksum = _checksum(tensor) if view and not tensor.is_meta else None

    def broken(self) -> bool:
        """Whether somebody wrote into it since."""
        if self._tensor._version == self._version or self._tensor.is_meta:
            return False
        return self._checksum is None or _checksum(self._tensor) != self._checksum


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
        self._seals = [Seal(x) for x in tensors]

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
