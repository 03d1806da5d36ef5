"""Stacked bars: a bar for each method or rank, divided into named parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from manyhands.report.chart import Figure, ReportPart, axis, escaped, numbers
from manyhands.report.theme import wrapped

ALL = "all methods"
"""The view with a bar for each method."""

Row = Mapping[str, float]
"""The parts of one bar."""


def stacked(bars: Mapping[str, Row], markers: Mapping[str, Any], hover: str, **x: Any) -> Figure:
    """A figure with these bars, the first one on top.

    Args:
        bars: the parts of each bar.
        markers: the style of each part, by its name.
        hover: how a value is shown, a format of plotly with its unit.
        x: the axis of the values: its title, and more.
    """
    names = [escaped(name) for name in bars]
    ticks = {"tickvals": names, "ticktext": [wrapped(name) for name in names]}
    layout = {
        "barmode": "stack",
        "bargap": 0.3,
        "legend": {"orientation": "h", "traceorder": "normal"},
        "xaxis": axis(rangemode="tozero", **x),
        "yaxis": {"automargin": True, "autorange": "reversed", "type": "category", **ticks},
        "height": 90 + 36 * max(len(names), 3),
    }
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "y": names,
            "x": numbers(row[name] for row in bars.values()),
            "marker": marker,
            "hovertemplate": f"%{{y}}<br>{name} {hover}<extra></extra>",
        }
        for name, marker in markers.items()
    ]
    return {"data": data, "layout": layout}


def bar_table(label: str, bars: Mapping[str, Row], parts: Sequence[str]) -> ReportPart:
    """The numbers of these bars."""
    return ReportPart((label,), (list(bars), *(numbers(row[name] for row in bars.values()) for name in parts)))
