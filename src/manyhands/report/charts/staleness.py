"""Staleness: a histogram of the lag of gradients, in shares of the steps."""

from __future__ import annotations

from collections import Counter
from statistics import fmean
from typing import Any

from manyhands.report.chart import Chart, ReportPart, Table, View, axis, escaped, number, numbers
from manyhands.report.groups import RunGroup, Section
from manyhands.report.theme import bar

BINS = 40
"""The most bars; wider bins if there would be more."""
LAYOUT = {
    "barmode": "group",
    "bargap": 0.15,
    "legend": {"orientation": "h"},
    "xaxis": axis("lag, in updates", type="category"),
    "yaxis": axis("share of steps", tickformat=".0%", rangemode="tozero"),
    "height": 360,
}


def staleness(section: Section) -> Chart:
    """A histogram for each group."""
    lags = {group.name: _lags(group) for group in section.groups}
    most = max((max(some, default=0) for some in lags.values()), default=0)
    width = most // BINS + 1
    bins = list(range(0, most + 1, width))
    ticks = [str(low) if width == 1 else f"{low} to {low + width - 1}" for low in bins]
    shares = {group.name: _shares(lags[group.name], bins, width) for group in section.groups}
    return Chart(
        "staleness",
        "Staleness",
        _summary(lags),
        Table(
            ("method", "lag", "share of steps"), [ReportPart((name,), (ticks, some)) for name, some in shares.items()]
        ),
        [View("", {"data": [_bars(group, ticks, shares[group.name]) for group in section.groups], "layout": LAYOUT})],
        about="The number of updates between reading the weights for a gradient and applying it.",
    )


def _bars(group: RunGroup, ticks: list[str], shares: list[float | int]) -> dict[str, Any]:
    return {
        "type": "bar",
        "name": escaped(group.name),
        "x": ticks,
        "y": shares,
        "marker": bar(group.index),
        "hovertemplate": f"{escaped(group.name)}<br>lag %{{x}}: %{{y:.1%}} of the steps<extra></extra>",
    }


def _lags(group: RunGroup) -> list[int]:
    return [lag for member in group.members for lag in member.measures.lags]


def _shares(lags: list[int], bins: list[int], width: int) -> list[float | int]:
    counts = Counter(lag // width * width for lag in lags)
    return numbers(counts[low] / len(lags) for low in bins) if lags else [0 for _ in bins]


def _summary(lags: dict[str, list[int]]) -> str:
    means = ", ".join(
        f"{name} {number(round(fmean(some), 2)):g} (at most {max(some)})" for name, some in lags.items() if some
    )
    return f"Bars of how stale gradients were; mean lag: {means}." if means else "No rank took a step."
