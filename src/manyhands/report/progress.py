"""How far a run is, on stderr: a bar on a terminal, a line every tenth of the way when piped.

    ssp on digits ━━━━━━━━━━━━━━━━━╸━━━━━━━━━━━━  62 %  loss 0.2134  15,310 samples/s  0:00:04 left

A run calls `start` once with its budget, `step` with every line of its record, and `stop`, which may be called twice.
Steps of real processes are told by the thread that watches over them, and a run may be stopped meanwhile.
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
"""Seconds between two pictures of the bar."""
SETTLED = 0.2
"""Seconds after the first step from which on the rate no longer counts the time that it took to start."""


class Progress(Protocol):
    """Somebody who is told how far a run is."""

    def start(self, total_samples: int, title: str) -> None:
        """The run begins; it will consume this many samples."""

    def step(self, line: Mapping[str, Any]) -> None:
        """One step is done: a line with `samples` and `loss`."""

    def stop(self) -> None:
        """The run is over, or has failed."""


class Tally:
    """What both ways of showing it know: samples so far and the mean loss since it was last shown."""

    def __init__(self, total: int = 0) -> None:
        self.total = total
        self.samples = 0.0
        self.loss: float | None = None
        self.began = time.monotonic()
        self._first: tuple[float, float] | None = None
        self._losses: list[float] = []

    def add(self, line: Mapping[str, Any]) -> None:
        """Count one step."""
        self.samples = min(self.total, self.samples + (line.get("samples") or 0))
        if self._first is None:
            self._first = time.monotonic(), self.samples
        loss = line.get("loss")
        if loss is not None:
            self._losses.append(loss)

    def words(self) -> tuple[str, str]:
        """The loss and the rate, freshly rounded."""
        if self._losses:
            self.loss = sum(self._losses) / len(self._losses)
            self._losses.clear()
        return "" if self.loss is None else f"loss {self.loss:.4f}", f"{self.rate():,.0f} samples/s"

    def rate(self) -> float:
        """Samples per second of the clock on the wall, since the first step if that was a while ago."""
        now = time.monotonic()
        if self._first is not None and now - self._first[0] >= SETTLED:
            return (self.samples - self._first[1]) / (now - self._first[0])
        return self.samples / max(now - self.began, 1e-9)

    def seconds_left(self) -> float:
        """What is left at this rate."""
        return (self.total - self.samples) / max(self.rate(), 1e-9)


class Bar:
    """A bar for a terminal. It draws when told of a step and never by itself, so no thread stands beside a run."""

    def __init__(self, title: str = "", stream: TextIO | None = None) -> None:
        self.title, self.stream = title, stream or sys.stderr
        self.tally = Tally()
        self.drawn = 0.0
        self.drawing: Drawing | None = None
        self._busy = threading.RLock()

    def start(self, total_samples: int, title: str) -> None:
        """Draw the empty bar."""
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
        """Count, and draw if the last picture is old enough."""
        with self._busy:
            self.tally.add(line)
            if time.monotonic() - self.drawn >= REDRAW:
                self._draw()

    def stop(self) -> None:
        """Draw the last picture and let go of the terminal."""
        with self._busy:
            if self.drawing is not None:
                self._draw()
                self.drawing.stop()
                self.drawing = None

    def _draw(self) -> None:
        if self.drawing is None:
            return
        self.drawn = time.monotonic()
        words = [*self.tally.words(), f"{clock(self.tally.seconds_left())} left"]
        task = self.drawing.task_ids[0]
        self.drawing.update(task, completed=self.tally.samples, words="  ".join(filter(None, words)), refresh=True)


class Lines:
    """A plain line every tenth of the way, for files and pipes."""

    def __init__(self, title: str = "", stream: TextIO | None = None) -> None:
        self.title, self.stream = title, stream or sys.stderr
        self.tally = Tally()
        self.tenths = 0

    def start(self, total_samples: int, title: str) -> None:
        """Say what begins."""
        self.tally, self.tenths = Tally(total_samples), 0
        print(f"{self.title or title}: {total_samples:,} samples", file=self.stream, flush=True)

    def step(self, line: Mapping[str, Any]) -> None:
        """Count, and print if another tenth is done."""
        self.tally.add(line)
        tenths = int(10 * self.tally.samples / max(self.tally.total, 1))
        if tenths > self.tenths:
            self.tenths = tenths
            share = int(100 * self.tally.samples / self.tally.total)
            words = [f"{share:3d} %", *self.tally.words(), f"{clock(self.tally.seconds_left())} left"]
            print("  ".join(filter(None, words)), file=self.stream, flush=True)

    def stop(self) -> None:
        """Nothing is held, so nothing is let go."""


def clock(seconds: float) -> str:
    """Seconds as h:mm:ss, rounded up."""
    whole = max(0, -int(-seconds // 1))
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def choose(title: str = "") -> Bar | Lines:
    """A bar if somebody is watching stderr, else lines; `title` says more than the run itself can."""
    return Bar(title) if sys.stderr.isatty() else Lines(title)
