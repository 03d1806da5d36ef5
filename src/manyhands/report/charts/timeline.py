"""The timeline of every rank: its activities in a window short enough to show single steps.

rank 0  |==compute==|                      team 0, rank 0  |==compute==|
rank 1  |=compute=|  wait  |               team 0, rank 1      |==compute==|
rank 2  |=compute=|  x lost                - - - - - - - - - - - - - - - - -
                                           team 1, rank 2  |==compute==|
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

from manyhands.report.chart import Chart, Figure, ReportPart, Table, View, axis, escaped, number, numbers
from manyhands.report.charts.time_breakdown import slowest
from manyhands.report.groups import GroupedRun, Section
from manyhands.report.moments import Incident, TimelineSegment, incidents, segments
from manyhands.report.theme import ACTIVITIES, LIGHT, colour, plural

STEPS = 40
"""The steps of each rank in one view, so few that single ones can be seen."""
BARS = 2000
"""The most bars of one view."""
ALL_BARS = 10000
"""The most bars of all views together, unless a view would have fewer than `FEWEST`."""
FEWEST = 250

Window = tuple[float, float]


def timeline(section: Section) -> Chart:
    """For each run a view of its beginning and, if a rank was lost later, one around that moment."""
    members = [member for member in section.members if member.run.steps]
    limit = max(FEWEST, min(BARS, ALL_BARS // max(1, len(members))))
    views, parts = [], []
    for member in members:
        for label, drawn, window in _windows(member, limit):
            columns = _columns(drawn)
            views.append(_view(section, member, label, columns, window))
            parts += [ReportPart((label, activity), tuple(lists)) for activity, lists in columns.items()]
            parts += _incident_parts(label, _within(member, window))
    return Chart(
        "timeline",
        "Timeline of every rank",
        _summary(members),
        Table(("run", "what", "rank", "from, s", "for, s"), parts),
        views,
        switch="Run",
        about="The activities of each rank over time. Shaded: all workers pause for an evaluation or a checkpoint. "
        "Drag with the mouse to zoom in.",
        beside=("trace.json", "All steps of all runs as a trace for Perfetto or chrome://tracing"),
        many=True,
    )


def _windows(member: GroupedRun, limit: int) -> list[tuple[str, list[TimelineSegment], Window]]:
    """The first steps and, if a rank was lost after them, the steps around its loss."""
    steps = member.run.steps
    ranks = set(slowest(member)[0])
    own = [line for line in steps if line["rank"] in ranks]
    shown = own[: STEPS * len(ranks)]
    first = list(islice((segment for line in shown for segment in segments(line)), limit))
    window = _start(first), _end(first)
    found = [(member.label, first, window)]
    lost = next((one for one in incidents(member.run) if one.kind == "lost"), None)
    if lost is not None and lost.at > window[1]:
        index = sum(line["time"] <= lost.at for line in own)
        half = min(STEPS * len(ranks), limit // 4) // 2
        near = own[max(0, index - half) : index + half]
        drawn = list(islice((segment for line in near for segment in segments(line)), limit))
        if drawn:
            around = _start(drawn), max(_end(drawn), lost.at)
            found.append((f"{member.label}, as rank {lost.rank} is lost", drawn, around))
    return found


def _start(drawn: Sequence[TimelineSegment]) -> float:
    return min((segment.start for segment in drawn), default=0.0)


def _end(drawn: Sequence[TimelineSegment]) -> float:
    return max((segment.start + segment.seconds for segment in drawn), default=0.0)


def _columns(drawn: Sequence[TimelineSegment]) -> dict[str, list[list[Any]]]:
    """Ranks, starts and lengths, by activity."""
    found: dict[str, list[list[Any]]] = {}
    for activity in ACTIVITIES:
        some = [segment for segment in drawn if segment.activity == activity]
        if some:
            starts, lengths = numbers(s.start for s in some), numbers(s.seconds for s in some)
            found[activity] = [[s.rank for s in some], starts, lengths]
    return found


def _view(
    section: Section, member: GroupedRun, label: str, columns: dict[str, list[list[Any]]], window: Window
) -> View:
    ranks, note = slowest(member)
    happened = _within(member, window)
    data = [_bars(activity, *lists) for activity, lists in columns.items()]
    data += [_markers(kind, some) for kind in ("lost", "slow") if (some := [i for i in happened if i.kind == kind])]
    layout = {
        "barmode": "overlay",
        "bargap": 0.25,
        "legend": {"orientation": "h", "traceorder": "normal"},
        "xaxis": axis(f"{section.seconds}, pauses included", range=numbers(window)),
        "yaxis": axis(
            "rank", autorange="reversed", type="category", categoryorder="array", categoryarray=ranks, **_teams(member)
        ),
        "shapes": [
            _shade(pause, window) for pause in member.measures.pauses if pause[0] < window[1] and pause[1] > window[0]
        ]
        + _borders(member),
        "height": 170 + 26 * max(len(ranks), 3),
    }
    figure: Figure = {"data": data, "layout": layout}
    return View(label, figure, " ".join([*_words(member, window), note]).strip())


def _teams(member: GroupedRun) -> dict[str, Any]:
    """What the ranks are called, if several of them are one worker."""
    ranks = slowest(member)[0]
    if member.run.team_size == 1:
        return {}
    return {"tickvals": ranks, "ticktext": [member.run.rank_name(rank) for rank in ranks]}


def _borders(member: GroupedRun) -> list[dict[str, Any]]:
    """Lines between teams."""
    ranks, size = slowest(member)[0], member.run.team_size
    places = [at for at in range(1, len(ranks)) if ranks[at] // size != ranks[at - 1] // size] if size > 1 else []
    line = {"width": 1, "dash": "dot", "color": "rgba(128,128,128,0.8)"}
    place = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "yref": "y"}
    return [{**place, "y0": at - 0.5, "y1": at - 0.5, "line": line} for at in places]


def _bars(activity: str, ranks: list[int], starts: list[float], lengths: list[float]) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "name": activity,
        "y": ranks,
        "base": starts,
        "x": lengths,
        "marker": {"color": LIGHT[ACTIVITIES[activity]], "line": {"width": 0}},
        "hovertemplate": f"rank %{{y}}: {activity}<br>%{{x:.4g}} s from %{{base:.6g}} s<extra></extra>",
    }


def _markers(kind: str, some: Sequence[Incident]) -> dict[str, Any]:
    shape = {"lost": "x", "slow": "triangle-right"}[kind]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": {"lost": "lost", "slow": "slowed down"}[kind],
        "x": numbers(one.at for one in some),
        "y": [one.rank for one in some],
        "marker": {"symbol": shape, "size": 13, "color": colour(7), "line": {"width": 1, "color": LIGHT[-1]}},
        "text": [escaped(one.text) for one in some],
        "hovertemplate": "%{text}<br>at %{x:.6g} s<extra></extra>",
        "cliponaxis": False,
    }


def _shade(pause: Window, window: Window) -> dict[str, Any]:
    start, stop = number(max(pause[0], window[0])), number(min(pause[1], window[1]))
    shape = {"type": "rect", "xref": "x", "yref": "paper", "x0": start, "x1": stop, "y0": 0, "y1": 1, "layer": "below"}
    return {**shape, "fillcolor": "rgba(128,128,128,0.25)", "line": {"width": 0}}


def _within(member: GroupedRun, window: Window) -> list[Incident]:
    ranks = set(member.measures.by_rank)
    return [one for one in incidents(member.run) if window[0] <= one.at <= window[1] and one.rank in ranks]


def _incident_parts(label: str, happened: Sequence[Incident]) -> list[ReportPart]:
    return [ReportPart((label, one.text), ([one.rank], [number(one.at)], [0])) for one in happened]


def _words(member: GroupedRun, window: Window) -> list[str]:
    """The share of steps in this window, and all incidents of the run."""
    ranks = set(slowest(member)[0])
    own = [line for line in member.run.steps if line["rank"] in ranks]
    inside = sum(window[0] <= line["began"] and line["time"] <= window[1] for line in own)
    first = f"{inside:,} of {plural(len(own), 'step')} of these ranks."
    when = {"lost": "at {:.4g} s", "slow": "from {:.4g} s on"}
    said = [f"{one.text}, {when[one.kind].format(one.at)}." for one in incidents(member.run)]
    return [first, *(text[0].upper() + text[1:] for text in said)]


def _summary(members: Sequence[GroupedRun]) -> str:
    lost = [
        f"{one.text} in {member.label}" for member in members for one in incidents(member.run) if one.kind == "lost"
    ]
    losses = f"; {'; '.join(lost)}" if lost else ""
    return f"Bars of the activities of each rank over time, for {plural(len(members), 'run')}{losses}."
