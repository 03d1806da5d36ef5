"""The time of each rank by activity: computing, encoding, sending, waiting, and the rest."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

from manyhands.report.chart import Chart, Figure, Table, View
from manyhands.report.charts.stacked import ALL, Row, bar_table, stacked
from manyhands.report.groups import GroupedRun, RunGroup, Section
from manyhands.report.theme import ACTIVITIES, activity, share_text

MOST_RANKS = 32
"""The most ranks that are drawn of one run, the slowest ones."""


def spent(section: Section) -> Chart:
    """One view with all methods side by side, and one per run with its ranks."""
    means = {group.name: row for group in section.groups if (row := _mean(group))}
    views = [View(ALL, _stacked(means, section.seconds))]
    parts = [bar_table(ALL, means, list(ACTIVITIES))]
    for member in section.members:
        rows = member.measures.spent()
        if rows:
            ranks, note = slowest(member)
            views.append(
                View(member.label, _stacked({f"rank {rank}": rows[rank] for rank in ranks}, section.seconds), note)
            )
            parts.append(bar_table(member.label, {f"rank {rank}": row for rank, row in rows.items()}, list(ACTIVITIES)))
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


def _stacked(bars: Mapping[str, Row], title: str) -> Figure:
    return stacked(bars, {name: activity(name) for name in ACTIVITIES}, "%{x:.4g} s", title=title)


def _summary(means: Mapping[str, Row]) -> str:
    shares = [f"{name} {share_text(row['wait'] / (sum(row.values()) or 1))}" for name, row in means.items()]
    return f"Stacked bars of what ranks did; share of the time spent waiting: {', '.join(shares)}."
