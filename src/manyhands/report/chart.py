"""A chart: figures to choose from, the table with their numbers, and one sentence for screen readers.

A figure is a plain dict for plotly. Figures and tables hold the same lists, so a page keeps each only once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from manyhands.report.measures import Curve, Floats

Figure = dict[str, Any]

POINTS = 300
"""The most points of a curve: more cannot be seen."""
DIGITS = 6
"""Significant digits of a number."""


@dataclass(frozen=True)
class ReportPart:
    """Rows of a table with the same first cells: `keys`, then one value of each column."""

    keys: tuple[str, ...]
    columns: tuple[list[Any], ...]

    def rows(self) -> Iterator[tuple[Any, ...]]:
        for values in zip(*self.columns, strict=True):
            yield *self.keys, *values


@dataclass(frozen=True)
class Table:
    """The numbers of a chart."""

    columns: tuple[str, ...]
    parts: list[ReportPart]

    def rows(self) -> Iterator[tuple[Any, ...]]:
        for part in self.parts:
            yield from part.rows()


@dataclass(frozen=True)
class View:
    """One figure of a chart, with its label in the switch above it."""

    label: str
    figure: Figure
    note: str = ""


@dataclass(frozen=True)
class Chart:
    """The content under one heading of a report."""

    name: str
    title: str
    summary: str
    table: Table
    views: list[View]
    switch: str = ""
    """The label of the switch, if there is more than one view."""
    about: str = ""
    """What the chart shows, as a sentence above it."""
    beside: tuple[str, str] | None = None
    """A file with more data, and its description."""
    many: bool = False
    """Whether there are so many views that the switch is a list."""


def number(value: float) -> float | int:
    """A number with `DIGITS` significant digits."""
    short = float(f"{value:.{DIGITS}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def numbers(values: Iterable[float]) -> list[float | int]:
    """The numbers with `DIGITS` significant digits each."""
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
    """Text for a figure, with the characters of tags escaped."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
