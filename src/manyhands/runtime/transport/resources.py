"""The threads and files of a transport, which end together: a process that joins again keeps none of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack


class Resources:
    """Threads that end by themselves when asked to, and files to close after that."""

    def __init__(self, *threads: threading.Thread) -> None:
        self.threads = [*threads]
        self._files = ExitStack()

    def closes(self, *files: Callable[[], None]) -> None:
        """Call these when all threads have ended, the last one first."""
        for close in files:
            self._files.callback(close)

    def close(self, seconds: float) -> None:
        """Wait for the threads that long, then close all files, unless a thread may still use them."""
        ends = time.monotonic() + seconds
        for thread in self.threads:
            thread.join(max(0.0, ends - time.monotonic()))
        if not any(thread.is_alive() for thread in self.threads):
            self._files.close()
