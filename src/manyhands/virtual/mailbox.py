"""Mailbox: the messages that have come to a rank, and that nobody there has asked for yet.

    all         as they came: whoever takes from anybody gets the first that fits
    by sender   the same messages once more: whoever takes from one rank does not look through those of all others

A lead that gathers has a message of every rank here, so to look through all of them for each would take the square.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable

from manyhands.core.protocols import ANY, Tag
from manyhands.virtual.messages import VirtualMessage


class Mailbox:
    """Messages in the order of their arrival."""

    __slots__ = ("_all", "_by_sender")

    def __init__(self) -> None:
        self._all: OrderedDict[VirtualMessage, None] = OrderedDict()
        self._by_sender: dict[int, list[VirtualMessage]] = {}

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, message: VirtualMessage) -> bool:
        return message in self._all

    def add(self, message: VirtualMessage) -> None:
        """A message has come."""
        self._all[message] = None
        self._by_sender.setdefault(message.frm, []).append(message)

    def remove(self, message: VirtualMessage) -> None:
        """Somebody has it now."""
        del self._all[message]
        same = self._by_sender[message.frm]
        if len(same) > 1:
            same.remove(message)
        else:
            del self._by_sender[message.frm]

    def take(self, tags: Collection[Tag], frm: int) -> VirtualMessage | None:
        """The first message with one of these tags from this rank, or from anybody."""
        candidates: Iterable[VirtualMessage] = self._all if frm == ANY else self._by_sender.get(frm, ())
        for message in candidates:
            if message.tag in tags:
                self.remove(message)
                return message
        return None
