"""Stragglers: each rank's median compute time, relative to the median over ranks."""

from __future__ import annotations

from statistics import median
from typing import Any

from manyhands.report.chart import Chart, ReportPart, Table, View, axis, escaped, numbers
from manyhands.report.groups import RunGroup, Section
from manyhands.report.theme import bar, count_text, marker

MOST_BARS = 160
"""With more, markers are drawn instead of bars."""


def stragglers(section: Section) -> Chart:
    """One bar for each rank and method; 1 is the median rank."""
    scores = {group.name: _scores(group) for group in section.groups}
    parts = [ReportPart((name,), (list(some), numbers(some.values()))) for name, some in scores.items() if some]
    crowded = sum(map(len, scores.values())) > MOST_BARS
    data = [_trace(group, scores[group.name], crowded) for group in section.groups if scores[group.name]]
    layout = {
        "legend": {"orientation": "h"},
        "xaxis": axis("rank", tickformat="d", **({"dtick": 1} if _most(scores) < 20 else {})),
        "yaxis": axis("times the median", rangemode="tozero"),
        "height": 320,
    }
    return Chart(
        "stragglers",
        "Stragglers",
        _summary(scores),
        Table(("method", "rank", "times the median"), parts),
        [View("", {"data": data, "layout": layout})],
        about="A rank at 2 computes twice as long for one mini-batch as the median rank.",
    )


def _trace(group: RunGroup, scores: dict[int, float], crowded: bool) -> dict[str, Any]:
    kind = {"type": "scatter", "mode": "markers", "marker": marker(group.index, size=8)}
    return {
        **(kind if crowded else {"type": "bar", "marker": bar(group.index)}),
        "name": escaped(group.name),
        "x": list(scores),
        "y": numbers(scores.values()),
        "hovertemplate": f"{escaped(group.name)}<br>rank %{{x}}: %{{y:.3g}} times<extra></extra>",
    }


def _scores(group: RunGroup) -> dict[int, float]:
    """The relative compute time of each rank, as the median over seeds."""
    found: dict[int, list[float]] = {}
    for member in group.members:
        for rank, score in member.measures.stragglers().items():
            found.setdefault(rank, []).append(score)
    return {rank: median(some) for rank, some in sorted(found.items())}


def _most(scores: dict[str, dict[int, float]]) -> int:
    return max((max(some, default=0) for some in scores.values()), default=0)


def _summary(scores: dict[str, dict[int, float]]) -> str:
    worst = max(((score, rank, name) for name, some in scores.items() for rank, score in some.items()), default=None)
    if worst is None:
        return "No rank took a step."
    slowest = f"the slowest is rank {worst[1]} of {worst[2]}, {count_text(worst[0])} times the median"
    return f"Bars of how slow each rank computes; {slowest}."
