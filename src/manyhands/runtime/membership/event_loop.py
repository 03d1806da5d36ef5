"""The event loop of one thread: sockets that are ready, calls that other threads post, and timers.

All callbacks run in that one thread, one after the other, so the state they share needs no locks. It uses epoll
directly, because reading a message passes through here: `selectors` would build an object per event.
"""

from __future__ import annotations

import heapq
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Protocol

Callback = Callable[[], object]


class HasFileno(Protocol):
    """A socket, or an object that owns one."""

    def fileno(self) -> int:
        """The file descriptor."""


class EventLoop:
    """Runs callbacks in one thread. Other threads and signal handlers may call only `post` and `stop`."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._callbacks: dict[int, Callback] = {}
        self._posted: deque[Callback] = deque()
        self._timers: list[tuple[float, int, Callback]] = []
        self._number = count()
        self._running = True
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._register(self._wakeup, select.EPOLLIN, self._run_posted)

    def on_readable(self, source: HasFileno, callback: Callback) -> None:
        """Call `callback` whenever `source` can be read, until `remove`."""
        self._register(source.fileno(), select.EPOLLIN, callback)

    def on_writable(self, source: HasFileno, callback: Callback) -> None:
        """Call `callback` whenever `source` can be written, until `remove`."""
        self._register(source.fileno(), select.EPOLLOUT, callback)

    def remove(self, source: HasFileno) -> None:
        """Stop watching `source`, before it is closed; nothing happens if it is not watched."""
        if self._callbacks.pop(source.fileno(), None) is not None:
            self._epoll.unregister(source.fileno())

    def post(self, callback: Callback) -> None:
        """Call `callback` in the loop's thread, as soon as possible."""
        self._posted.append(callback)
        os.eventfd_write(self._wakeup, 1)

    def later(self, seconds: float, callback: Callback) -> None:
        """Call `callback` after that many seconds."""
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._number), callback))

    def run_once(self) -> None:
        """Wait for events and run their callbacks."""
        timers = self._timers
        timeout = max(0.0, timers[0][0] - time.monotonic()) if timers else None
        for file, _ in self._epoll.poll(timeout):
            callback = self._callbacks.get(file)
            if callback is not None:  # an earlier callback may have removed it
                callback()
        while timers and timers[0][0] <= time.monotonic():
            heapq.heappop(timers)[2]()

    def start(self, name: str) -> threading.Thread:
        """Run in a new daemon thread until `stop`."""
        thread = threading.Thread(target=self._run, name=name, daemon=True)
        thread.start()
        return thread

    def stop(self) -> None:
        """End the thread that `start` made, after the callbacks that were posted before."""
        self.post(lambda: setattr(self, "_running", False))

    def close(self) -> None:
        """Close the loop's own file descriptors; no thread may be running it."""
        self._epoll.close()
        os.close(self._wakeup)

    def _register(self, file: int, events: int, callback: Callback) -> None:
        if file not in self._callbacks:
            self._epoll.register(file, events)
        self._callbacks[file] = callback

    def _run(self) -> None:
        while self._running:
            self.run_once()

    def _run_posted(self) -> None:
        os.eventfd_read(self._wakeup)
        posted = self._posted
        while posted:
            posted.popleft()()
