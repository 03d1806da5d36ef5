"""The progress of a run: a bar on a terminal or in a notebook, a line after every tenth of the samples when piped.

    ssp on digits ━━━━━━━━━━━━━━━━━╸━━━━━━━━━━━━  62 %  loss 0.2134  15,310 samples/s  0:00:04 left

A run calls `start` once with its budget, `step` with every line of its record, and `stop`, which may be called twice.
With real processes `step` is called by the thread that monitors them, and another thread may call `stop` at any time.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress as Drawing

REDRAW = 0.1
"""Seconds between two drawings of the bar."""
SETTLED = 0.2
"""Seconds after the first step from which the rate leaves out the time before that step."""


class Progress(Protocol):
    """Receives the progress of a run."""

    def start(self, total_samples: int, title: str) -> None:
        """A run begins, with a budget of so many samples."""

    def step(self, line: Mapping[str, Any]) -> None:
        """The next line of the record; those of kind "step" have `samples` and `loss`."""

    def stop(self) -> None:
        """The run has ended or failed."""


class Tally:
    """The state of both displays: samples so far, and the mean loss since it was last shown."""

    def __init__(self, total: int = 0) -> None:
        self.total = total
        self.samples = 0.0
        self.loss: float | None = None
        self.began = time.monotonic()
        self._first: tuple[float, float] | None = None
        self._losses: list[float] = []

    def add(self, line: Mapping[str, Any]) -> None:
        """Count a line, if it is one of a step."""
        if line["kind"] != "step":
            return
        self.samples = min(self.total, self.samples + line["samples"])
        if self._first is None:
            self._first = time.monotonic(), self.samples
        if line["loss"] is not None:
            self._losses.append(line["loss"])

    def words(self) -> tuple[str, str]:
        """The loss and the rate as text; the next mean loss begins here."""
        if self._losses:
            self.loss = sum(self._losses) / len(self._losses)
            self._losses.clear()
        return "" if self.loss is None else f"loss {self.loss:.4f}", f"{self.rate():,.0f} samples/s"

    def rate(self) -> float:
        """Samples per second of wall time, counted from the first step once that is `SETTLED` seconds ago."""
        now = time.monotonic()
        if self._first is not None and now - self._first[0] >= SETTLED:
            return (self.samples - self._first[1]) / (now - self._first[0])
        return self.samples / max(now - self.began, 1e-9)

    def seconds_left(self) -> float:
        """The time that the remaining samples take at this rate."""
        return (self.total - self.samples) / max(self.rate(), 1e-9)


class Bar:
    """A bar for a terminal. It is drawn only from `step`, so that no thread runs beside the job."""

    def __init__(self, title: str = "", stream: TextIO | None = None) -> None:
        self.title, self.stream = title, stream or sys.stderr
        self.tally = Tally()
        self.drawn = 0.0
        self.drawing: Drawing | None = None
        self._busy = threading.RLock()

    def start(self, total_samples: int, title: str) -> None:
        """Draw the bar at 0 samples."""
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

        self.tally, self.drawn = Tally(total_samples), 0.0
        columns = [
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[words]}"),
        ]
        self.drawing = Progress(*columns, console=Console(file=self.stream), auto_refresh=False)
        self.drawing.add_task(self.title or title, total=total_samples, words="")
        self.drawing.start()

    def step(self, line: Mapping[str, Any]) -> None:
        """Count the line, and draw if the last drawing is old enough."""
        with self._busy:
            self.tally.add(line)
            if time.monotonic() - self.drawn >= REDRAW:
                self._draw()

    def stop(self) -> None:
        """Draw once more and release the terminal."""
        with self._busy:
            if self.drawing is not None:
                self._draw()
                self.drawing.stop()
                self.drawing = None

    def _draw(self) -> None:
        if self.drawing is None:
            return
        self.drawn = time.monotonic()
        task = self.drawing.task_ids[0]
        self.drawing.update(task, completed=self.tally.samples, words=self.words(), refresh=True)

    def words(self) -> str:
        """Loss, rate and time left."""
        words = [*self.tally.words(), f"{clock(self.tally.seconds_left())} left"]
        return "  ".join(filter(None, words))


class ProgressLines:
    """A plain line after every tenth of the samples, for files and pipes."""

    def __init__(self, title: str = "", stream: TextIO | None = None) -> None:
        self.title, self.stream = title, stream or sys.stderr
        self.tally = Tally()
        self.tenths = 0

    def start(self, total_samples: int, title: str) -> None:
        """Print the title and the budget."""
        self.tally, self.tenths = Tally(total_samples), 0
        print(f"{self.title or title}: {total_samples:,} samples", file=self.stream, flush=True)

    def step(self, line: Mapping[str, Any]) -> None:
        """Count the line, and print if another tenth is complete."""
        self.tally.add(line)
        tenths = int(10 * self.tally.samples / max(self.tally.total, 1))
        if tenths > self.tenths:
            self.tenths = tenths
            share = int(100 * self.tally.samples / self.tally.total)
            words = [f"{share:3d} %", *self.tally.words(), f"{clock(self.tally.seconds_left())} left"]
            print("  ".join(filter(None, words)), file=self.stream, flush=True)

    def stop(self) -> None:
        """There is nothing to release."""


def clock(seconds: float) -> str:
    """Seconds as h:mm:ss, rounded up."""
    whole = max(0, -int(-seconds // 1))
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def is_notebook() -> bool:
    """Whether this process is the kernel of a notebook, whose output may be HTML."""
    ipython: Any = sys.modules.get("IPython")  # a kernel has imported it
    return ipython is not None and getattr(ipython.get_ipython(), "kernel", None) is not None


def choose(title: str = "") -> Bar | ProgressLines:
    """A bar in a notebook or if stderr is a terminal, else lines; `title` replaces that of the run."""
    if is_notebook():
        from manyhands.report.notebook import NotebookBar

        return NotebookBar(title)
    return Bar(title) if sys.stderr.isatty() else ProgressLines(title)
