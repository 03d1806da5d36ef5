"""Staleness: histograms of the lag of gradients, applied and dropped, and of how far apart the shards of reads were."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from manyhands.core.record import StepLine
from manyhands.report.chart import Chart, ReportPart, Table, View, axis, escaped, number, numbers
from manyhands.report.groups import RunGroup, Section
from manyhands.report.theme import bar

BINS = 40
"""The most bars; wider bins if there would be more."""
LAYOUT = {
    "barmode": "group",
    "bargap": 0.15,
    "legend": {"orientation": "h"},
    "yaxis": axis("share of steps", tickformat=".0%", rangemode="tozero"),
    "height": 360,
}


@dataclass(frozen=True)
class Histogram:
    """What is counted: a label, the title of its axis, and its value in a step; None if the step has none."""

    label: str
    title: str
    value: Callable[[StepLine], int | None]


def _dropped(line: StepLine) -> int | None:
    return round(line["dropped_lag_sum"] / line["dropped"]) if line.get("dropped") else None


APPLIED = Histogram("applied gradients", "lag, in updates", lambda line: line["lag"])
OTHERS = (
    Histogram("dropped gradients", "lag when dropped, in updates", _dropped),
    Histogram("shards of a read", "versions apart", lambda line: line.get("apart")),
)
"""Shown only if a run has any."""


def staleness(section: Section) -> Chart:
    """A view for each histogram, with bars for each group that has values."""
    found = [(one, _values(section, one)) for one in (APPLIED, *OTHERS)]
    shown = [(one, values) for one, values in found if one is APPLIED or values]
    drawn = [_view(section, one, values) for one, values in shown]
    return Chart(
        "staleness",
        "Staleness",
        _summary(shown),
        Table(("of", "method", "updates", "share of steps"), [part for _, parts in drawn for part in parts]),
        [view for view, _ in drawn],
        switch="Staleness of",
        about="The lag of a gradient is the number of updates of the same weights between reading them for it and "
        "applying it.",
    )


def _values(section: Section, what: Histogram) -> dict[str, list[int]]:
    """The values of each group that has any."""
    found = {group.name: _of_group(group, what) for group in section.groups}
    return {name: values for name, values in found.items() if values}


def _of_group(group: RunGroup, what: Histogram) -> list[int]:
    steps = (line for member in group.members for line in member.run.steps)
    return [value for line in steps if (value := what.value(line)) is not None]


def _view(section: Section, what: Histogram, values: dict[str, list[int]]) -> tuple[View, list[ReportPart]]:
    """The bars, and the same numbers for the table."""
    most = max(map(max, values.values()), default=0)
    width = most // BINS + 1
    bins = list(range(0, most + 1, width))
    ticks = [str(low) if width == 1 else f"{low} to {low + width - 1}" for low in bins]
    shares = {name: _shares(some, bins, width) for name, some in values.items()}
    bars = [_bars(group, ticks, shares[group.name]) for group in section.groups if group.name in shares]
    layout = LAYOUT | {"xaxis": axis(what.title, type="category")}
    undefined = ", ".join(g.name for g in section.groups if what is APPLIED and _is_undefined(g))
    view = View(what.label, {"data": bars, "layout": layout}, f"Not defined for {undefined}." if undefined else "")
    return view, [ReportPart((what.label, name), (ticks, some)) for name, some in shares.items()]


def _is_undefined(group: RunGroup) -> bool:
    return any(member.run.header.get("lag") == "not defined" for member in group.members)


def _bars(group: RunGroup, ticks: list[str], shares: list[float | int]) -> dict[str, Any]:
    return {
        "type": "bar",
        "name": escaped(group.name),
        "x": ticks,
        "y": shares,
        "marker": bar(group.index),
        "hovertemplate": f"{escaped(group.name)}<br>%{{x}}: %{{y:.1%}} of the steps<extra></extra>",
    }


def _shares(values: list[int], bins: list[int], width: int) -> list[float | int]:
    counts = Counter(value // width * width for value in values)
    return numbers(counts[low] / len(values) for low in bins)


def _summary(shown: Sequence[tuple[Histogram, dict[str, list[int]]]]) -> str:
    """The means over the steps of each method."""
    parts = []
    for what, values in shown:
        means = [f"{name} {number(round(fmean(some), 2)):g} (at most {max(some)})" for name, some in values.items()]
        if means:
            parts.append(f"{what.label}: mean {what.title} {', '.join(means)}.")
    return f"Bars of how stale gradients were. {' '.join(parts)}" if parts else "The lag of no gradient is known."
