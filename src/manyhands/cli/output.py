"""Output on stdout: tables as text, or one JSON value for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from manyhands.core.record import plain

if TYPE_CHECKING:
    from rich.console import Console

PIPED_WIDTH = 140
"""The width of a table that is written to a file or a pipe."""


def print_json(value: Any) -> None:
    """One JSON value on one line."""
    print(json.dumps(plain(value), ensure_ascii=False, allow_nan=False))


def console() -> Console:
    """The console of tables: as wide as the terminal, in colour unless NO_COLOR is set."""
    from rich.console import Console

    class Screen(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # rich would end the process here, with code 1

    return Screen(width=None if sys.stdout.isatty() else PIPED_WIDTH, highlight=False)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table; its first column is bold and never wrapped."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, style="bold" if number == 0 else "", no_wrap=number == 0)
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    console().print(table)
