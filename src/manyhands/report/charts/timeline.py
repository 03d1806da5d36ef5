"""The timeline of every rank: what it did when, in a window that is short enough to see single steps.

rank 0  |==compute==|
rank 1  |=compute=|  wait  |
rank 2  |=compute=|  x lost
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

from manyhands.report.chart import Chart, Figure, Part, Table, View, axis, escaped, number, numbers
from manyhands.report.charts.spent import slowest
from manyhands.report.groups import Member, Section
from manyhands.report.look import ACTIVITIES, LIGHT, colour, plural
from manyhands.report.moments import Incident, Segment, incidents, segments

STEPS = 40
"""Of each rank, so that single ones can be seen."""
BARS = 2000
"""Of one view at most."""
ALL_BARS = 10000
"""Of all views together, as far as each can have enough."""
FEWEST = 250

Window = tuple[float, float]


def timeline(section: Section) -> Chart:
    """For each run its beginning and, if a rank was lost later, what happened around that."""
    members = [member for member in section.members if member.run.steps]
    limit = max(FEWEST, min(BARS, ALL_BARS // max(1, len(members))))
    views, parts = [], []
    for member in members:
        for label, drawn, window in _windows(member, limit):
            columns = _columns(drawn)
            views.append(_view(section, member, label, columns, window))
            parts += [Part((label, activity), tuple(lists)) for activity, lists in columns.items()]
            parts += _incident_parts(label, _within(member, window))
    return Chart(
        "timeline",
        "Timeline of every rank",
        _summary(members),
        Table(("run", "what", "rank", "from, s", "for, s"), parts),
        views,
        switch="Run",
        about="What each rank did when. Shaded: everyone pauses for an evaluation or a checkpoint. "
        "With a mouse, drag to look closer.",
        beside=("trace.json", "All steps of all runs as a trace for Perfetto or chrome://tracing"),
        many=True,
    )


def _windows(member: Member, limit: int) -> list[tuple[str, list[Segment], Window]]:
    """The first steps; and those around the first loss, if it comes later."""
    steps = member.run.steps
    ranks = set(slowest(member)[0])
    own = [line for line in steps if line["rank"] in ranks]
    shown = own[: STEPS * len(ranks)]
    first = list(islice((segment for line in shown for segment in segments(line)), limit))
    window = _start(first), _end(first)
    found = [(member.label, first, window)]
    lost = next((one for one in incidents(member.run) if one.kind == "lost"), None)
    if lost is not None and lost.at > window[1]:
        place = sum(line["time"] <= lost.at for line in own)
        half = min(STEPS * len(ranks), limit // 4) // 2
        near = own[max(0, place - half) : place + half]
        drawn = list(islice((segment for line in near for segment in segments(line)), limit))
        if drawn:
            around = _start(drawn), max(_end(drawn), lost.at)
            found.append((f"{member.label}, as rank {lost.rank} is lost", drawn, around))
    return found


def _start(drawn: Sequence[Segment]) -> float:
    return min((segment.start for segment in drawn), default=0.0)


def _end(drawn: Sequence[Segment]) -> float:
    return max((segment.start + segment.seconds for segment in drawn), default=0.0)


def _columns(drawn: Sequence[Segment]) -> dict[str, list[list[Any]]]:
    """By activity: ranks, starts, lengths."""
    found: dict[str, list[list[Any]]] = {}
    for activity in ACTIVITIES:
        some = [segment for segment in drawn if segment.activity == activity]
        if some:
            starts, lengths = numbers(s.start for s in some), numbers(s.seconds for s in some)
            found[activity] = [[s.rank for s in some], starts, lengths]
    return found


def _view(section: Section, member: Member, label: str, columns: dict[str, list[list[Any]]], window: Window) -> View:
    ranks, note = slowest(member)
    happened = _within(member, window)
    data = [_bars(activity, *lists) for activity, lists in columns.items()]
    data += [_markers(kind, some) for kind in ("lost", "slow") if (some := [i for i in happened if i.kind == kind])]
    layout = {
        "barmode": "overlay",
        "bargap": 0.25,
        "legend": {"orientation": "h", "traceorder": "normal"},
        "xaxis": axis(f"{section.seconds}, pauses included", range=numbers(window)),
        "yaxis": axis("rank", autorange="reversed", type="category", categoryorder="array", categoryarray=ranks),
        "shapes": [
            _shade(rest, window) for rest in member.measures.rests if rest[0] < window[1] and rest[1] > window[0]
        ],
        "height": 170 + 26 * max(len(ranks), 3),
    }
    figure: Figure = {"data": data, "layout": layout}
    return View(label, figure, " ".join([*_words(member, window), note]).strip())


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


def _shade(rest: Window, window: Window) -> dict[str, Any]:
    start, stop = number(max(rest[0], window[0])), number(min(rest[1], window[1]))
    shape = {"type": "rect", "xref": "x", "yref": "paper", "x0": start, "x1": stop, "y0": 0, "y1": 1, "layer": "below"}
    return {**shape, "fillcolor": "rgba(128,128,128,0.25)", "line": {"width": 0}}


def _within(member: Member, window: Window) -> list[Incident]:
    ranks = set(member.measures.by_rank)
    return [one for one in incidents(member.run) if window[0] <= one.at <= window[1] and one.rank in ranks]


def _incident_parts(label: str, happened: Sequence[Incident]) -> list[Part]:
    return [Part((label, one.text), ([one.rank], [number(one.at)], [0])) for one in happened]


def _words(member: Member, window: Window) -> list[str]:
    """What part of the run this is, and what happened in all of it."""
    ranks = set(slowest(member)[0])
    own = [line for line in member.run.steps if line["rank"] in ranks]
    inside = sum(window[0] <= line["began"] and line["time"] <= window[1] for line in own)
    first = f"{inside:,} of {plural(len(own), 'step')} of these ranks."
    when = {"lost": "at {:.4g} s", "slow": "from {:.4g} s on"}
    said = [f"{one.text}, {when[one.kind].format(one.at)}." for one in incidents(member.run)]
    return [first, *(text[0].upper() + text[1:] for text in said)]


def _summary(members: Sequence[Member]) -> str:
    lost = [
        f"{one.text} in {member.label}" for member in members for one in incidents(member.run) if one.kind == "lost"
    ]
    told = f"; {'; '.join(lost)}" if lost else ""
    return f"Bars of what each rank did when, for {plural(len(members), 'run')}{told}."
