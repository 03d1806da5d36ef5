"""Activities of real processes: threads."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Ended(BaseException):
    """Raised in the waits of daemon activities once their rank has left."""


class RealActivity:
    """Runs an activity in a daemon thread."""

    def __init__(self, run: Callable[[], None], name: str) -> None:
        self.thread = threading.Thread(target=run, name=name, daemon=True)
        self.thread.start()

    def join(self) -> None:
        """Wait until the activity has ended."""
        self.thread.join()


def later(seconds: float, call: Callable[[], None]) -> None:
    """Call it after `seconds`, in a daemon thread."""
    timer = threading.Timer(seconds, call)
    timer.daemon = True
    timer.start()
