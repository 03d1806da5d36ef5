"""A chart: figures to choose from, the table with their numbers, and one sentence for whoever cannot see them.

A figure is a plain dict as plotly takes it. Figures and tables hold the same lists, so a page keeps each only once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from manyhands.report.measures import Curve, Floats

Figure = dict[str, Any]

POINTS = 300
"""Of a curve: more cannot be seen."""
DIGITS = 6
"""Significant ones."""


@dataclass(frozen=True)
class Part:
    """Rows of a table that begin alike: `keys`, then one value of each column."""

    keys: tuple[str, ...]
    columns: tuple[list[Any], ...]

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """Row by row."""
        for values in zip(*self.columns, strict=True):
            yield *self.keys, *values


@dataclass(frozen=True)
class Table:
    """The numbers of a chart."""

    columns: tuple[str, ...]
    parts: list[Part]

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """All rows."""
        for part in self.parts:
            yield from part.rows()


@dataclass(frozen=True)
class View:
    """One figure of a chart, as the switch above it calls it."""

    label: str
    figure: Figure
    note: str = ""


@dataclass(frozen=True)
class Chart:
    """What stands under one heading of a report."""

    name: str
    title: str
    summary: str
    table: Table
    views: list[View]
    switch: str = ""
    """What one chooses, if there is more than one view."""
    about: str = ""
    """What it shows, for people who see it first."""
    beside: tuple[str, str] | None = None
    """A file with more, and what it is."""
    many: bool = False
    """So many views that they are a list to choose from."""


def number(value: float) -> float | int:
    """A number with as many digits as can be seen."""
    short = float(f"{value:.{DIGITS}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def numbers(values: Iterable[float]) -> list[float | int]:
    """Each with as many digits as can be seen."""
    return [number(value) for value in values]


def thin(curve: Curve, points: int = POINTS) -> Curve:
    """The curve with fewer points, among them the first and the last."""
    if len(curve.values) <= points:
        return curve
    kept = np.unique(np.linspace(0, len(curve.values) - 1, points).round().astype(int))
    columns: Sequence[Floats] = (curve.seconds, curve.samples, curve.bytes, curve.values)
    return Curve(*(column[kept] for column in columns))


def axis(title: str, **more: Any) -> dict[str, Any]:
    """An axis with a title."""
    return {"title": {"text": title, "standoff": 8}, "automargin": True, **more}


def escaped(text: str) -> str:
    """Text inside a figure, where tags would have a meaning."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
