"""The progress of a comparison: a table on a terminal or in a notebook, a line for each run when piped.

method    run            loss     accuracy   samples/s    bytes     lag    waiting   time to target
bsp       3 of 3 done    0.0211   0.9722     32.1 k       18.1 MB   0      12%       0.61 s
ssp       2 of 3, 62%    0.0410   0.9583     45.9 k       11.0 MB   1.9    3%        0.42 s
easgd     waits
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from manyhands.report.measures import Target, totals
from manyhands.report.progress import Progress, is_notebook
from manyhands.report.reading import RecordedRun
from manyhands.report.result_tables import UNKNOWN
from manyhands.report.theme import bytes_text, count_text, number_text, seconds_text, share_text

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table as Drawing

REDRAW = 0.2
"""Seconds between two drawings of the table."""
COLUMNS = ("method", "run", "loss", "accuracy", "samples/s", "bytes", "lag", "waiting", "time to target")


class Row:
    """One method: the current run, step by step, and the completed ones."""

    def __init__(self, name: str, seeds: int, target: Target | None, table: LiveTable | None) -> None:
        self.name, self.seeds = name, seeds
        self.done: list[dict[str, Any]] = []
        self._target, self._table = target, table
        self._total, self._words = 0, ""
        self._clear()

    def _clear(self) -> None:
        self.running = False
        self.samples = self.inside = self.waited = self.time = self.lags = 0.0
        self.steps = self.applied = 0
        self.loss = self.accuracy = self.reached = None
        self.bytes: dict[int, int] = {}

    def begin(self, words: str) -> Row:
        """Prepare for the next run of this method."""
        self._words = words
        return self

    def start(self, total_samples: int, title: str) -> None:
        """The run begins, with a budget of so many samples."""
        self._clear()
        self._total, self.running = total_samples, True

    def step(self, line: Mapping[str, Any]) -> None:
        """Take the next line of the run's record."""
        if line["kind"] == "evaluation":
            self._evaluated(line)
        if line["kind"] != "step":
            return
        self.samples += line["samples"]
        self.time = max(self.time, line["time"])
        self.steps += 1
        if line["lag"] is not None:
            self.applied += line.get("applied", 1)
            self.lags += line.get("lag_sum", line["lag"])
        self.waited += line["wait"]
        self.inside += line["time"] - line["began"]
        self.bytes[line["rank"]] = line["bytes"]
        if line["loss"] is not None:
            self.loss = line["loss"] if self.loss is None else self.loss + 0.1 * (line["loss"] - self.loss)
        if self._table is not None:
            self._table.draw()

    def _evaluated(self, line: Mapping[str, Any]) -> None:
        self.accuracy, target = line["accuracy"], self._target
        found = self.reached is None and target is not None and target.what == "accuracy"
        if found and target is not None and self.accuracy is not None and self.accuracy >= target.value:
            self.reached = line["time"]

    def stop(self) -> None:
        """The run has ended."""
        self.running = False

    def state(self) -> str:
        """The number of the run, and its progress."""
        if not self.running:
            many = len(self.done)
            return f"{many} of {self.seeds} done" if many else "waits"
        share = f"{min(1.0, self.samples / self._total):.0%}" if self._total else "running"
        return f"{self._words}, {share}" if self._words else f"{len(self.done) + 1} of {self.seeds}, {share}"

    def cells(self) -> list[str]:
        """The cells of the row."""
        if not self.running and self.done:
            return [self.name, self.state(), *ended(self.done[-1])]
        if not self.steps:
            return [self.name, self.state(), *[""] * (len(COLUMNS) - 2)]
        rate = count_text(self.samples / self.time if self.time else None)
        sent, waiting = bytes_text(sum(self.bytes.values())), share_text(self.waited / max(self.inside, 1e-12))
        lag = count_text(self.lags / self.applied) if self.applied else UNKNOWN
        numbers = [number_text(self.loss), number_text(self.accuracy), rate, sent, lag]
        return [self.name, self.state(), *numbers, waiting, seconds_text(self.reached)]


def ended(row: Mapping[str, Any]) -> list[str]:
    """The last cells of a completed run, from its totals."""
    if row["failure"] is not None:
        return [f"failed: {row['failure']}", *[""] * (len(COLUMNS) - 3)]
    rate, sent = count_text(row["samples_per_second"]), bytes_text(row["bytes"])
    last = [count_text(row["mean_lag"]) or UNKNOWN, share_text(row["waiting"]), seconds_text(row["seconds_to_target"])]
    return [number_text(row["loss"]), number_text(row["accuracy"]), rate, sent, *last]


class LiveBoard:
    """The rows of all methods; a comparison calls `run` and `done`."""

    def __init__(self, names: Sequence[str], seeds: int, target: Target | None) -> None:
        table = self if isinstance(self, LiveTable) else None
        self.target = target
        self.rows = {name: Row(name, seeds, target, table) for name in names}

    def run(self, method: str, seed: int, words: str) -> Progress:
        """A run begins; `words` name its purpose, such as a trial of `--tune`."""
        self._trial = bool(words)
        return self.rows[method].begin(words)

    def done(self, run: RecordedRun) -> None:
        """The run has ended."""
        if not self._trial:
            self.rows[run.method].done.append(totals(run, self.target))

    def __enter__(self) -> LiveBoard:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """There is nothing to release."""


class LiveTable(LiveBoard):
    """A table for a terminal. It is drawn only from `Row.step`, so that no thread runs beside the job."""

    def __enter__(self) -> LiveTable:
        self._drawn = 0.0
        self._open()
        return self

    def draw(self, *, now: bool = False) -> None:
        """Draw the table, if the last drawing is old enough."""
        if now or time.monotonic() - self._drawn >= REDRAW:
            self._drawn = time.monotonic()
            self._show()

    def done(self, run: RecordedRun) -> None:
        super().done(run)
        self.draw(now=True)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.draw(now=True)
        self._close()

    def _open(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._live: Live = Live(self._drawing(), console=Console(file=sys.stderr), auto_refresh=False)
        self._live.start()

    def _show(self) -> None:
        self._live.update(self._drawing(), refresh=True)

    def _close(self) -> None:
        self._live.stop()

    def _drawing(self) -> Drawing:
        from rich import box
        from rich.table import Table as Drawing
        from rich.text import Text

        table = Drawing(box=box.SIMPLE_HEAD, pad_edge=False)
        for column in COLUMNS:
            table.add_column(column, no_wrap=column != "loss")
        for row in self.rows.values():
            table.add_row(*map(Text, row.cells()))
        return table


class LiveLines(LiveBoard):
    """A plain line for each run, for files and pipes."""

    def done(self, run: RecordedRun) -> None:
        super().done(run)
        names = ("loss", "accuracy", "samples/s", "bytes", "lag", "waiting", "time to target")
        row = totals(run, self.target)
        words = [f"{name} {cell}" for name, cell in zip(names, ended(row), strict=True) if cell]
        what = f"{run.method}, seed {run.seed}{' (tuning)' if self._trial else ''}"
        text = f"failed: {row['failure']}" if row["failure"] is not None else "  ".join(words)
        print(f"{what}: {text}", file=sys.stderr, flush=True)


def choose(names: Sequence[str], seeds: int, target: Target | None) -> LiveBoard:
    """A table in a notebook or if stderr is a terminal, else lines."""
    if is_notebook():
        from manyhands.report.notebook import NotebookTable

        return NotebookTable(names, seeds, target)
    return (LiveTable if sys.stderr.isatty() else LiveLines)(names, seeds, target)
