"""The time of each rank by activity: computing, encoding, sending, waiting, and the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from manyhands.report.chart import Chart, Figure, ReportPart, Table, View, axis, escaped, numbers
from manyhands.report.groups import GroupedRun, RunGroup, Section
from manyhands.report.theme import ACTIVITIES, activity, share_text, wrapped

MOST_RANKS = 32
"""The most ranks that are drawn of one run, the slowest ones."""
ALL = "all methods"

Row = Mapping[str, float]


def spent(section: Section) -> Chart:
    """One view with all methods side by side, and one per run with its ranks."""
    means = {group.name: row for group in section.groups if (row := _mean(group))}
    views = [View(ALL, _stacked(list(means), list(means.values()), section.seconds))]
    parts = [_part(ALL, list(means), list(means.values()))]
    for member in section.members:
        rows = member.measures.spent()
        if rows:
            ranks, note = slowest(member)
            names = [f"rank {rank}" for rank in ranks]
            views.append(View(member.label, _stacked(names, [rows[rank] for rank in ranks], section.seconds), note))
            parts.append(_part(member.label, [f"rank {rank}" for rank in rows], list(rows.values())))
    return Chart(
        "spent",
        "Where the time went",
        _summary(means),
        Table(("shown", "bar", *(f"{name}, s" for name in ACTIVITIES)), parts),
        views,
        switch="Show",
        about="Seconds inside steps; those of a method are the mean of its ranks. "
        "Wait: for messages, barriers and locks of other ranks. Other: the rest, such as applying updates.",
        many=True,
    )


def slowest(member: GroupedRun) -> tuple[list[int], str]:
    """The ranks to draw, in order, and a note if these are not all."""
    scores = member.measures.stragglers()
    if len(scores) <= MOST_RANKS:
        return sorted(scores), ""
    kept = sorted(scores, key=lambda rank: -scores[rank])[:MOST_RANKS]
    return sorted(kept), f"Of {len(scores)} ranks the {MOST_RANKS} slowest are drawn."


def _mean(group: RunGroup) -> dict[str, float]:
    rows = [row for member in group.members for row in member.measures.spent().values()]
    return {name: fmean(row[name] for row in rows) for name in ACTIVITIES} if rows else {}


def _part(label: str, names: list[str], rows: Sequence[Row]) -> ReportPart:
    return ReportPart((label,), (names, *(numbers(row[name] for row in rows) for name in ACTIVITIES)))


def _stacked(names: Sequence[str], rows: Sequence[Row], title: str) -> Figure:
    """A bar for each name, the first one on top."""
    bars = [escaped(name) for name in names]
    ticks = {"tickvals": bars, "ticktext": [wrapped(name) for name in bars]}
    layout = {
        "barmode": "stack",
        "bargap": 0.3,
        "legend": {"orientation": "h", "traceorder": "normal"},
        "xaxis": axis(title, rangemode="tozero"),
        "yaxis": {"automargin": True, "autorange": "reversed", "type": "category", **ticks},
        "height": 90 + 36 * max(len(bars), 3),
    }
    return {"data": [_bars(name, bars, [row[name] for row in rows]) for name in ACTIVITIES], "layout": layout}


def _bars(name: str, bars: list[str], seconds: list[float]) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": bars,
        "x": numbers(seconds),
        "marker": activity(name),
        "hovertemplate": f"%{{y}}<br>{name} %{{x:.4g}} s<extra></extra>",
    }


def _summary(means: Mapping[str, Row]) -> str:
    shares = [f"{name} {share_text(row['wait'] / (sum(row.values()) or 1))}" for name, row in means.items()]
    return f"Stacked bars of what ranks did; share of the time spent waiting: {', '.join(shares)}."
