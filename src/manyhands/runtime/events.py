"""One thread's work: what sockets bring, what other threads hand over, and what has become due.

Everything is done by that one thread, one thing after the other, so that what it works on needs no locks.
"""

from __future__ import annotations

import heapq
import os
import selectors
import time
from collections.abc import Callable
from itertools import count
from queue import Empty, SimpleQueue
from typing import Protocol

Act = Callable[[], object]


class Readable(Protocol):
    """A socket, or something that has one."""

    def fileno(self) -> int:
        """Its number."""


class Events:
    """What there is to do. Only `post` may be called by other threads, and by signal handlers."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._posted: SimpleQueue[Act] = SimpleQueue()
        self._due: list[tuple[float, int, Act]] = []
        self._number = count()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._bell, selectors.EVENT_READ, self._answer)

    def on(self, sock: Readable, act: Act) -> None:
        """Do `act` whenever there is something to read."""
        self._selector.register(sock.fileno(), selectors.EVENT_READ, act)

    def off(self, sock: Readable) -> None:
        """No longer listen to it; before it is closed."""
        self._selector.unregister(sock.fileno())

    def post(self, act: Act) -> None:
        """Do `act` soon."""
        self._posted.put(act)
        os.eventfd_write(self._bell, 1)

    def later(self, seconds: float, act: Act) -> None:
        """Do `act` in that many seconds."""
        heapq.heappush(self._due, (time.monotonic() + seconds, next(self._number), act))

    def turn(self) -> None:
        """Wait until there is something to do, and do it."""
        timeout = max(0.0, self._due[0][0] - time.monotonic()) if self._due else None
        for key, _ in self._selector.select(timeout):
            if key.fd in self._selector.get_map():  # an act before this one may have closed it
                key.data()
        while self._due and self._due[0][0] <= time.monotonic():
            heapq.heappop(self._due)[2]()

    def close(self) -> None:
        self._selector.close()
        os.close(self._bell)

    def _answer(self) -> None:
        os.eventfd_read(self._bell)
        try:
            while True:
                self._posted.get_nowait()()
        except Empty:
            pass
