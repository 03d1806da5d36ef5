"""Loss and accuracy on the way: over time, samples or bytes, all on one axis that can be switched."""

from __future__ import annotations

from typing import Any

from manyhands.report.chart import Chart, Figure, Part, Table, View, axis, escaped, numbers, thin
from manyhands.report.groups import Member, Section
from manyhands.report.look import line, marker, plural, share_text
from manyhands.report.measures import Curve

AXES = ("seconds", "samples", "bytes")
LOGARITHMIC = 10.0
"""From this ratio of the largest loss to the smallest on, the axis of losses is logarithmic."""


def curves(section: Section) -> Chart:
    """One line for each run, thinned out; runs of one group share a colour."""
    lines = [
        (member, what, _columns(thin(getattr(member.measures, what)))) for member in section.members for what in WHAT
    ]
    lines = [one for one in lines if one[2]["values"]]
    parts = [
        Part((member.name, str(member.run.seed), what), (*(columns[name] for name in AXES), columns["values"]))
        for member, what, columns in lines
    ]
    views = [View(label, _figure(section, lines, name, label)) for name, label in labels(section).items()]
    return Chart(
        "curves",
        "Loss and accuracy on the way",
        _summary(section),
        Table(("method", "seed", "measure", section.seconds, "samples", "bytes", "value"), parts),
        views,
        switch="Over",
        about="Loss of mini-batches, averaged over a moving window, and accuracy on test data. "
        "Pauses for evaluation do not count as time; samples and bytes are those of all workers.",
    )


WHAT = ("loss", "accuracy")


def labels(section: Section) -> dict[str, str]:
    """What each axis is called."""
    return {"seconds": section.seconds, "samples": "samples", "bytes": "bytes sent"}


def _columns(curve: Curve) -> dict[str, list[Any]]:
    return {name: numbers(getattr(curve, name)) for name in (*AXES, "values")}


def _figure(section: Section, lines: list[tuple[Member, str, dict[str, list[Any]]]], name: str, label: str) -> Figure:
    """Losses above, accuracies below, one axis for both; only one of them if there is nothing of the other."""
    shown = [what for what in WHAT if any(one == what for _, one, _ in lines)] or ["loss"]
    named: set[str] = set()
    data = []
    for member, what, columns in lines:
        data.append(_trace(member, what, columns, name, "" if what == shown[0] else "2", member.name not in named))
        named.add(member.name)
    layout: dict[str, Any] = {"hovermode": "closest", "legend": {"orientation": "h"}, "height": 280 * len(shown) + 60}
    for place, what in enumerate(shown):
        low, high = 1 - (place + 1) / len(shown), 1 - place / len(shown)
        domain = [low + (0.04 if place + 1 < len(shown) else 0), high - (0.04 if place else 0)]
        scale = {"type": "log"} if what == "loss" and _wide(lines) else {}
        y = {"tickformat": ".0%"} if what == "accuracy" else {}
        layout[f"yaxis{place + 1 if place else ''}"] = axis(what, domain=domain, **scale, **y)
    bottom = f"y{len(shown) if len(shown) > 1 else ''}"
    layout["xaxis"] = axis(
        label, anchor=bottom, rangemode="tozero", **({"tickformat": "~s", "ticksuffix": "B"} if name == "bytes" else {})
    )
    return {"data": data, "layout": layout}


def _trace(
    member: Member, what: str, columns: dict[str, list[Any]], name: str, axes: str, legend: bool
) -> dict[str, Any]:
    unit = {"bytes": "%{x:.4s}B", "samples": "%{x:,} samples", "seconds": "%{x:.4g} s"}[name]
    return {
        "type": "scatter",
        "mode": "lines" if what == "loss" else "lines+markers",
        "name": escaped(member.name),
        "legendgroup": escaped(member.name),
        "showlegend": legend,
        "x": columns[name],
        "y": columns["values"],
        "yaxis": f"y{axes}",
        "line": line(member.place, width=1.8),
        "marker": marker(member.place, size=6),
        "hovertemplate": f"{escaped(member.label)}<br>{what} %{{y:.4g}} at {unit}<extra></extra>",
    }


def _wide(lines: list[tuple[Member, str, dict[str, list[Any]]]]) -> bool:
    losses = [value for _, what, columns in lines if what == "loss" for value in columns["values"]]
    return bool(losses) and min(losses) > 0 and max(losses) / min(losses) >= LOGARITHMIC


def _summary(section: Section) -> str:
    scores = [(section.total(member)["accuracy"], member.label) for member in section.members]
    best = max(((score, label) for score, label in scores if score is not None), default=None)
    text = f"Lines of loss and accuracy of {plural(len(section.members), 'run')}"
    return f"{text}; the highest accuracy is {share_text(best[0])}, by {best[1]}." if best else f"{text}."
