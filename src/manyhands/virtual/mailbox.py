"""The mailbox of a virtual rank: the messages that have arrived and were not received yet.

    all         in the order of arrival: a receive from ANY takes the first that matches
    by sender   the same messages by rank: a receive from one rank does not search those of all others

A lead that gathers has a message of every rank here, so searching all of them for each rank would take quadratic time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from manyhands.core.port import ANY, Tag, matches
from manyhands.virtual.messages import VirtualMessage


class VirtualMailbox:
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
        """Queue a message that has arrived."""
        self._all[message] = None
        self._by_sender.setdefault(message.frm, []).append(message)

    def remove(self, message: VirtualMessage) -> None:
        """Take out a message that was received or replaced."""
        del self._all[message]
        others = self._by_sender[message.frm]
        if len(others) > 1:
            others.remove(message)
        else:
            del self._by_sender[message.frm]

    def take(self, tags: Sequence[Tag], frm: int) -> VirtualMessage | None:
        """Remove and return the first message that matches one of `tags`, from rank `frm` or ANY."""
        candidates: Iterable[VirtualMessage] = self._all if frm == ANY else self._by_sender.get(frm, ())
        for message in candidates:
            if matches(message.tag, tags):
                self.remove(message)
                return message
        return None
