"""Loss and accuracy during training, over time, samples or bytes, on one axis that can be switched."""

from __future__ import annotations

import math
from typing import Any

from manyhands.report.chart import Chart, Figure, ReportPart, Table, View, axis, escaped, number, numbers, thin
from manyhands.report.groups import GroupedRun, Section
from manyhands.report.measures import Curve
from manyhands.report.theme import colour, line, marker, plural, share_text

AXES = ("seconds", "samples", "bytes")
WHAT = ("loss", "accuracy")
LOGARITHMIC = 10.0
"""The ratio of the largest loss to the smallest from which the axis of losses is logarithmic."""

Drawn = tuple[GroupedRun, str, dict[str, list[Any]]]
"""A run, the measure, and the columns of its curve."""


def curves(section: Section) -> Chart:
    """One line for each run, thinned out; runs of one group share a colour."""
    lines = [
        (member, what, _columns(thin(getattr(member.measures, what)))) for member in section.members for what in WHAT
    ]
    lines = [one for one in lines if one[2]["values"]]
    parts = [
        ReportPart((member.name, str(member.run.seed), what), (*(columns[name] for name in AXES), columns["values"]))
        for member, what, columns in lines
    ]
    views = [View(label, _figure(section, lines, name, label)) for name, label in labels(section).items()]
    return Chart(
        "curves",
        "Loss and accuracy during training",
        _summary(section),
        Table(("method", "seed", "measure", section.seconds, "samples", "bytes", "value"), parts),
        views,
        switch="Over",
        about="Loss of mini-batches, averaged over a moving window, and accuracy on test data. "
        "Thin lines are further seeds. Pauses for evaluation are left out; samples and bytes are those of all workers.",
    )


def labels(section: Section) -> dict[str, str]:
    """The titles of the axes."""
    return {"seconds": section.seconds, "samples": "samples", "bytes": "bytes sent"}


def _columns(curve: Curve) -> dict[str, list[Any]]:
    return {name: numbers(getattr(curve, name)) for name in (*AXES, "values")}


def _figure(section: Section, lines: list[Drawn], name: str, label: str) -> Figure:
    """Losses above, accuracies below, with one x axis; one of them alone if the other has no values."""
    shown = [what for what in WHAT if any(one == what for _, one, _ in lines)] or ["loss"]
    typical = {group.name: group.typical for group in section.groups}
    data = []
    for member, what, columns in lines:
        first, bold = what == shown[0], typical[member.name] is member
        trace = {**_trace(member, what, columns["values"], bold), "showlegend": bold and first}
        data.append({**trace, "x": columns[name], "yaxis": "y" if first else "y2", **_hover(member, what, name)})
    form = {"tickformat": "~s", "ticksuffix": "B"} if name == "bytes" else {}
    layout = {"hovermode": "closest", "legend": {"orientation": "h"}, "height": 280 * len(shown) + 60}
    below = {"anchor": "y2" if len(shown) > 1 else "y"}
    return {
        "data": data,
        "layout": layout | _heights(lines, shown) | {"xaxis": axis(label, rangemode="tozero", **below, **form)},
    }


def _heights(lines: list[Drawn], shown: list[str]) -> dict[str, Any]:
    """The axes of losses and of accuracies, one above the other."""
    domains = [[0.54, 1.0], [0.0, 0.46]] if len(shown) > 1 else [[0.0, 1.0]]
    forms = {"loss": _logarithmic(lines), "accuracy": {"tickformat": ".0%"}}
    axes = [axis(what, domain=domain, **forms[what]) for what, domain in zip(shown, domains, strict=True)]
    return dict(zip(("yaxis", "yaxis2"), axes, strict=False))


def _trace(member: GroupedRun, what: str, values: list[Any], bold: bool) -> dict[str, Any]:
    """A thick line for the median run of a group, thin lines for the others."""
    style = line(member.index, width=2.2) if bold else {"color": colour(member.index), "width": 1}
    return {
        "type": "scatter",
        "mode": "lines+markers" if (bold and what == "accuracy") or len(values) == 1 else "lines",
        "name": escaped(member.name),
        "legendgroup": escaped(member.name),
        "y": values,
        "line": style,
        "marker": marker(member.index, size=7),
        "opacity": 1 if bold else 0.4,
    }


def _hover(member: GroupedRun, what: str, name: str) -> dict[str, str]:
    unit = {"bytes": "%{x:.4s}B", "samples": "%{x:,} samples", "seconds": "%{x:.4g} s"}[name]
    return {"hovertemplate": f"{escaped(member.label)}<br>{what} %{{y:.4g}} at {unit}<extra></extra>"}


def _logarithmic(lines: list[Drawn]) -> dict[str, Any]:
    """A logarithmic axis if the losses span several magnitudes, with round numbers as ticks."""
    losses = [value for _, what, columns in lines if what == "loss" for value in columns["values"]]
    if not losses or min(losses) <= 0 or max(losses) / min(losses) < LOGARITHMIC:
        return {}
    powers = range(math.floor(math.log10(min(losses))), math.ceil(math.log10(max(losses))) + 1)
    ticks = [number(digit * 10.0**power) for power in powers for digit in ((1, 2, 5) if len(powers) <= 4 else (1,))]
    return {"type": "log", "tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]}


def _summary(section: Section) -> str:
    scores = [(section.total(member)["accuracy"], member.label) for member in section.members]
    best = max(((score, label) for score, label in scores if score is not None), default=None)
    text = f"Lines of loss and accuracy of {plural(len(section.members), 'run')}"
    return f"{text}; the highest accuracy is {share_text(best[0])}, by {best[1]}." if best else f"{text}."
