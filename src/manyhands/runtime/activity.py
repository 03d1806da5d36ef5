"""Activities among real processes are threads."""

from __future__ import annotations

import threading


class Ended(BaseException):
    """The rank has left: its daemons need not go on."""


class RealActivity:
    """A thread of this rank."""

    def __init__(self, thread: threading.Thread) -> None:
        self._thread = thread

    def join(self) -> None:
        """Wait until it has ended."""
        self._thread.join()
