"""Progress in a notebook: HTML below the cell, which is replaced while the run proceeds.

It is drawn with IPython's own display, because rich needs ipywidgets there and shows nothing without them.
"""

from __future__ import annotations

import time
from html import escape
from typing import Any

from manyhands.report.live import COLUMNS, LiveTable
from manyhands.report.progress import Bar, Tally
from manyhands.report.result_tables import html_table


class HtmlOutput:
    """One output of the cell that runs; each call of `show` replaces what it shows."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, html: str, text: str) -> None:
        """Show the HTML, or the text where a front end shows text only."""
        from IPython import display

        draw: Any = display.display  # it has no types
        shown = {"text/html": html, "text/plain": text}
        if self._handle is None:
            self._handle = draw(shown, raw=True, display_id=True)
        else:
            self._handle.update(shown, raw=True)


class NotebookBar(Bar):
    """The bar of a run, with the same words as on a terminal."""

    output: HtmlOutput | None = None

    def start(self, total_samples: int, title: str) -> None:
        """Draw the bar at 0 samples."""
        self.tally, self.output, self._name = Tally(total_samples), HtmlOutput(), self.title or title
        self._draw()

    def stop(self) -> None:
        """Draw once more."""
        with self._busy:
            self._draw()
            self.output = None

    def _draw(self) -> None:
        if self.output is None:
            return
        share = self.tally.samples / max(1, self.tally.total)
        words = f"{share:.0%}  {self.words() if share else ''}".strip()
        bar = f'<progress value="{share:.4f}" max="1"></progress>'
        self.drawn = time.monotonic()
        self.output.show(f"<div>{escape(self._name)} {bar} {escape(words)}</div>", f"{self._name}  {words}")


class NotebookTable(LiveTable):
    """The table of a comparison."""

    def _open(self) -> None:
        self._output = HtmlOutput()
        self._show()

    def _show(self) -> None:
        rows = [row.cells() for row in self.rows.values()]
        text = "\n".join("  ".join(filter(None, row)) for row in rows)
        self._output.show(html_table(rows, COLUMNS), text)

    def _close(self) -> None:
        """The output stays as it is."""
