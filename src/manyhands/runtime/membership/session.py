"""A session: one join of all ranks, until they leave. A script that joins again begins the next one.

    rank 0   join .. leave  join .. leave            session 0, session 1
    rank 1   join ...... leave  join .. leave

A rank may join again before the others have left, so each session has its own channels, memory, clock and authority.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Protocol

from manyhands.runtime.membership.control_channel import ControlChannel, Fields
from manyhands.runtime.membership.error_codec import Facts
from manyhands.runtime.membership.memfd import Memories
from manyhands.runtime.rank_spec import JOIN_TIMEOUT

REJOIN = 1800.0
"""Seconds until all ranks must have joined again: one of them may evaluate between two sessions."""
AGAIN = (
    "it ended without joining again, but every rank must join equally often; "
    "a server rank joins again only if its script has `with mh.join(...)`"
)


def within(deadline: float) -> str:
    """The time in which ranks must have joined, in words, with what changes it."""
    return f"within {deadline:g} s" + ("" if deadline == REJOIN else f" (--join-timeout or {JOIN_TIMEOUT} sets this)")


class Authority(Protocol):
    """Decides about a session: a `Membership`, or the link to one. Called in the watcher's thread only."""

    @property
    def done(self) -> bool:
        """Whether no other host needs this watcher any more."""

    def on_message(self, rank: int, kind: str, fields: Fields) -> None:
        """A rank has sent a message."""

    def on_exit(self, rank: int, why: str, code: int | None) -> None:
        """A rank's process has ended."""

    def on_deadline(self, deadline: float) -> None:
        """The time in which all ranks must be connected has passed."""

    def finish(self) -> None:
        """Ask all ranks to stop after their current step."""

    def abort(self, cause: Facts) -> None:
        """End the run of all ranks."""

    def close(self) -> None:
        """All ranks of this host have ended."""


class Session:
    """What a watcher keeps of one session: the channels of its ranks, and their shared memory.

    Args:
        ranks: those of this host.
    """

    authority: Authority

    def __init__(self, ranks: Collection[int]) -> None:
        self.channels: dict[int, ControlChannel] = {}
        self.memories = Memories()
        self.left: set[int] = set()
        """The ranks that have left, or whose processes have ended."""
        self._ranks = ranks
        self._began = 0.0

    def send(self, to: Sequence[int], kind: str, fields: Fields) -> None:
        """Send a message to those of `to` that are connected."""
        if kind == "begin":  # the ranks of one machine share its clock
            self._began = self._began or time.monotonic()
            fields = {"at": self._began}
        for rank in to:
            if rank in self.channels:
                self.channels[rank].send(kind, fields)

    def leave(self, rank: int) -> None:
        """A rank has left; the last one leaves no memory behind."""
        self.left.add(rank)
        if self.left.issuperset(self._ranks):
            self.memories.close()

    def close(self) -> None:
        """All ranks of this host have ended."""
        self.authority.close()
        self.memories.close()
