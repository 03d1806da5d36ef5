"""Activities among real processes are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Ended(BaseException):
    """The rank has left: its daemons need not go on."""


class RealActivity:
    """A thread of this rank."""

    def __init__(self, thread: threading.Thread) -> None:
        self._thread = thread

    def join(self) -> None:
        """Wait until it has ended."""
        self._thread.join()


def later(seconds: float, call: Callable[[], None]) -> None:
    """Call it after a while, in a thread that keeps nobody alive."""
    timer = threading.Timer(seconds, call)
    timer.daemon = True
    timer.start()
