"""Pareto: two costs of each method against each other. No method is better in both than one on the front.

bytes |  o                     With a target: time, bytes and memory until it was reached.
      |  *---.    o            Without one: final accuracy or loss, against time and bytes.
      |      *---.
      |          *             * on the front, o not
      +--------------- seconds
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from manyhands.report.chart import Chart, Figure, ReportPart, Table, View, axis, escaped, number
from manyhands.report.groups import RunGroup, Section
from manyhands.report.theme import colour, marker, plural

BYTES = {"tickformat": "~s", "ticksuffix": "B", "rangemode": "tozero"}
PLAIN = {"rangemode": "tozero"}
SCORES = {"accuracy": {"tickformat": ".1%"}, "loss": {"rangemode": "tozero"}}


@dataclass(frozen=True)
class Side:
    """One axis: the key of `totals`, its names and format, and whether less is better."""

    key: str
    short: str
    title: str
    form: dict[str, str]
    less: bool = True


@dataclass(frozen=True)
class Point:
    """A group at the medians of its runs."""

    group: RunGroup
    x: float
    y: float
    runs: list[tuple[float, float]]
    seeds: list[int]
    front: bool = False


def front(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Which points are on the front: no other is at least as low in both and lower in one."""
    return [not any(a <= x and b <= y and (a, b) != (x, y) for a, b in points) for x, y in points]


def pareto(section: Section) -> Chart:
    """One point for each group, small ones for its runs."""
    pairs = _sides(section)
    points = [(x, y, _points(section, x, y)) for x, y in pairs]
    parts = [_part(point, x, y) for x, y, some in points for point in some]
    views = [View(_label(section, x, y), _figure(x, y, some), _missing(section, some)) for x, y, some in points]
    return Chart(
        "pareto",
        "Cost" if section.target is None else f"Cost to reach {section.target}",
        _summary(points[0][2], *pairs[0]),
        Table(("method", "across", "up", "point", "across, value", "up, value"), parts),
        views,
        switch="Compare" if section.target is None else "Time against",
        about="Large markers are medians over the seeds, small ones single runs. "
        "Circles and the line mark the front: no other is better in both.",
    )


def _part(point: Point, x: Side, y: Side) -> ReportPart:
    """Rows for the median and for every run."""
    median = f"median of {plural(len(point.runs), 'run')}{', on the front' if point.front else ''}"
    names = [median, *(f"seed {seed}" for seed in point.seeds)]
    pairs = [(point.x, point.y), *point.runs]
    columns = (names, [number(a) for a, _ in pairs], [number(b) for _, b in pairs])
    return ReportPart((point.group.name, x.title, y.title), columns)


def _label(section: Section, x: Side, y: Side) -> str:
    return y.short if section.target is not None else f"{y.short} and {x.short}"


def _sides(section: Section) -> list[tuple[Side, Side]]:
    if section.target is not None:
        x = Side("seconds_to_target", "time", f"{section.seconds} to {section.target}", PLAIN)
        return [
            (x, Side("bytes_to_target", "bytes sent", "bytes sent", BYTES)),
            (x, Side("memory", "memory of a rank", "memory of a rank", BYTES)),
        ]
    costs = [Side("seconds", "time", section.seconds, PLAIN), Side("bytes", "bytes", "bytes sent", BYTES)]
    known = [what for what in ("accuracy", "loss") if any(section.total(m)[what] is not None for m in section.members)]
    scores = [Side(what, what, f"final {what}", SCORES[what], less=what == "loss") for what in known or ["loss"]]
    return [(cost, score) for score in scores for cost in costs]


def _points(section: Section, x: Side, y: Side) -> list[Point]:
    found = []
    for group in section.groups:
        rows = [section.total(member) for member in group.members if member.run.failure is None]
        rows = [row for row in rows if row[x.key] is not None and row[y.key] is not None]
        pairs = [(row[x.key], row[y.key]) for row in rows]
        if pairs:
            across, up = (group.middle([pair[side] for pair in pairs]) for side in (0, 1))
            assert across is not None and up is not None
            found.append(Point(group, across, up, pairs, [row["seed"] for row in rows]))
    signs = [1 if side.less else -1 for side in (x, y)]
    best = front([(signs[0] * point.x, signs[1] * point.y) for point in found])
    return [replace(point, front=on) for point, on in zip(found, best, strict=True)]


def _figure(x: Side, y: Side, points: Sequence[Point]) -> Figure:
    ends = sorted((point for point in points if point.front), key=lambda point: point.x)
    data: list[dict[str, Any]] = [_front_line(ends)] if ends else []
    for point in points:
        data += [_small(point), _large(point, x, y)]
    layout = {
        "legend": {"orientation": "h"},
        "xaxis": axis(x.title, **x.form),
        "yaxis": axis(y.title, **y.form),
        "height": 420,
    }
    return {"data": data, "layout": layout}


def _front_line(ends: Sequence[Point]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": "Pareto front",
        "x": [number(point.x) for point in ends],
        "y": [number(point.y) for point in ends],
        "line": {"color": colour(5), "dash": "dot", "width": 1.5},
        "marker": {"color": colour(5), "symbol": "circle-open", "size": 24, "line": {"width": 1.5}},
        "hoverinfo": "skip",
    }


def _small(point: Point) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": escaped(point.group.name),
        "legendgroup": escaped(point.group.name),
        "showlegend": False,
        "x": [number(a) for a, _ in point.runs],
        "y": [number(b) for _, b in point.runs],
        "marker": marker(point.group.index, size=6, opacity=0.5),
        "hoverinfo": "skip",
    }


def _large(point: Point, x: Side, y: Side) -> dict[str, Any]:
    name = escaped(point.group.name)
    return {
        **_small(point),
        "showlegend": True,
        "x": [number(point.x)],
        "y": [number(point.y)],
        "marker": marker(point.group.index, size=13),
        "hoverinfo": "all",
        "hovertemplate": f"{name}<br>{x.title} {_format(x)('x')}<br>{y.title} {_format(y)('y')}<extra></extra>",
    }


def _format(side: Side) -> Callable[[str], str]:
    kind = ":.4s}B" if side.form is BYTES else ":.4g}"
    return lambda letter: f"%{{{letter}{kind}"


def _missing(section: Section, points: Sequence[Point]) -> str:
    """The groups without a point, and those with points of some runs only."""
    drawn = {point.group.name: len(point.runs) for point in points}
    absent = [group.name for group in section.groups if group.name not in drawn]
    some = [
        f"{g.name} ({drawn[g.name]} of {plural(len(g.members), 'run')})"
        for g in section.groups
        if 0 < drawn.get(g.name, 0) < len(g.members)
    ]
    what = "Failed" if section.target is None else "Not reached, or failed"
    return " ".join(f"{title}: {', '.join(names)}." for title, names in ((what, absent), ("In part", some)) if names)


def _summary(points: Sequence[Point], x: Side, y: Side) -> str:
    names = ", ".join(point.group.name for point in points if point.front)
    if not names:
        return "No run has a point here."
    return f"Points of {y.title} against {x.title}; on the front: {names}."
