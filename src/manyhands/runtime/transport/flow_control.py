"""Flow control: how many messages of a channel (receiver and tag name) may be in flight, and how they are acknowledged.

A receiver need not acknowledge a released message at once: while a channel has fewer messages in flight than its
credit, its sender cannot be waiting. So acknowledgements are piggybacked on the next message to that rank, and are sent
alone only when the credit is used up.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from manyhands.core.errors import MayNotWait
from manyhands.core.port import Tag, inside_backward
from manyhands.core.send_guard import SendGuard
from manyhands.runtime.transport.wire import Acks

SPARE = 2
"""Extra credit for messages that replace unread ones: a replaced message is released by its replacement."""


class InFlight(NamedTuple):
    """A message that its receiver has not released: the buffer its tensors lie in, and guards against writes."""

    tag: Tag
    buffer: Tensor | None = None
    guards: tuple[SendGuard, ...] = ()


class Channels:
    """The sending side: which messages are in flight, by channel and serial number."""

    def __init__(self, rank: int, check: Callable[[], None]) -> None:
        self._rank = rank
        self._check = check
        self._in_flight: dict[tuple[int, str], dict[int, InFlight | None]] = {}
        self._closed: set[int] = set()
        self._serial = 0
        self._changed = threading.Condition(threading.Lock())

    def open(self, to: int, tag: Tag, *, latest: bool) -> int | None:
        """Wait for credit; the serial number of the next message, or None if the receiver is gone."""
        most = tag.credit + SPARE if latest else tag.credit
        with self._changed:
            channel = self._in_flight.setdefault((to, tag.name), {})
            while len(channel) >= most and to not in self._closed:
                if inside_backward():
                    raise MayNotWait(f"rank {self._rank} may not wait inside a backward pass for credit to send {tag}")
                self._check()
                self._changed.wait()
            self._check()
            if to in self._closed:
                return None
            self._serial += 1
            channel[self._serial] = None
            return self._serial

    def sent(self, to: int, serial: int, message: InFlight) -> None:
        """Remember what the message holds until it is acknowledged."""
        with self._changed:
            channel = self._in_flight[to, message.tag.name]
            if serial in channel:
                channel[serial] = message

    def in_flight(self, to: int, acks: Acks) -> list[InFlight]:
        """The messages that `acks` names; each counts once, however often a peer names it."""
        with self._changed:
            messages = [self._in_flight.get((to, name), {}).get(serial) for name, serial in dict.fromkeys(acks)]
        return [message for message in messages if message is not None]

    def acknowledge(self, to: int, acks: Acks) -> None:
        """The receiver has released these messages: their credit is free again."""
        with self._changed:
            for name, serial in acks:
                self._in_flight.get((to, name), {}).pop(serial, None)
            self._changed.notify_all()

    def close(self, to: int) -> None:
        """This rank is gone: forget what was sent to it, and do not wait for its credit."""
        with self._changed:
            self._closed.add(to)
            for (rank, _), channel in self._in_flight.items():
                if rank == to:
                    channel.clear()
            self._changed.notify_all()

    def reopen(self, to: int) -> None:
        """This rank has joined."""
        with self._changed:
            self._closed.discard(to)

    def wake(self) -> None:
        """Wake every sender that waits for credit, so that it notices the end of the run."""
        with self._changed:
            self._changed.notify_all()

    def wait_until_acknowledged(self, seconds: float) -> None:
        """Wait until nothing is in flight, at most so long."""
        with self._changed:
            self._changed.wait_for(lambda: not any(self._in_flight.values()), seconds)


class PendingAcks:
    """The receiving side: released messages that are not acknowledged yet."""

    def __init__(self, *, at_once: bool) -> None:
        self._at_once = at_once
        self._pending: dict[int, list[tuple[str, int]]] = {}
        self._in_flight: dict[tuple[int, str], int] = {}
        """Messages received and not acknowledged, by channel."""
        self._lock = threading.Lock()

    def received(self, frm: int, name: str, credit: int) -> Acks:
        """A message has arrived; the acknowledgements to send now, because its sender may be waiting for credit."""
        with self._lock:
            self._in_flight[frm, name] = self._in_flight.get((frm, name), 0) + 1
            return self._due(frm, name, credit)

    def released(self, frm: int, name: str, serial: int, credit: int) -> Acks:
        """A message was released; the acknowledgements to send now."""
        with self._lock:
            self._pending.setdefault(frm, []).append((name, serial))
            return self._due(frm, name, credit)

    def take(self, to: int) -> Acks:
        """The acknowledgements to piggyback on a message to this rank."""
        if not self._pending.get(to):
            return ()
        with self._lock:
            return self._take(to)

    def _due(self, frm: int, name: str, credit: int) -> Acks:
        if self._pending.get(frm) and (self._at_once or self._in_flight[frm, name] >= credit):
            return self._take(frm)
        return ()

    def _take(self, to: int) -> Acks:
        acks = tuple(self._pending[to])
        self._pending[to] = []
        for name, _ in acks:
            self._in_flight[to, name] -= 1
        return acks
