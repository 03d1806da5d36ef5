"""The memory of each rank by purpose: weights, gradient, optimizer, versions of the weights, activations, and the rest.

Records of methods and versions that measured less have all of it as the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from manyhands.report.chart import Chart, Figure, ReportPart, Table, View, axis, escaped, numbers
from manyhands.report.groups import GroupedRun, Section
from manyhands.report.theme import bar, bytes_text, wrapped

PURPOSES = {
    "weights": "weights",
    "gradient": "gradient",
    "optimizer": "optimizer",
    "other versions": "version_bytes",
    "activations": "activations",
}
"""The parts of a bar, each with the field of the record."""
REST = "the rest"
NAMES = (*PURPOSES, REST)
MOST_RANKS = 32
"""The most ranks that are drawn of one run, those with the most memory."""
ALL = "all methods"

Row = dict[str, int]


def memory(section: Section) -> Chart:
    """One view with the largest rank of every method, and one per run with its ranks."""
    largest = {group.name: _largest(group.typical) for group in section.groups if group.typical.run.memory_lines}
    views = [View(ALL, _stacked(list(largest), list(largest.values())))]
    parts = [_part(ALL, list(largest), list(largest.values()))]
    for member in section.members:
        rows = by_rank(member.run.memory_lines)
        if rows:
            kept = sorted(sorted(rows, key=lambda rank: -sum(rows[rank].values()))[:MOST_RANKS])
            note = "" if len(rows) <= MOST_RANKS else f"Of {len(rows)} ranks the {MOST_RANKS} largest are drawn."
            views.append(View(member.label, _stacked([f"rank {rank}" for rank in kept], [rows[r] for r in kept]), note))
            parts.append(_part(member.label, [f"rank {rank}" for rank in rows], list(rows.values())))
    return Chart(
        "memory",
        "What memory is for",
        _summary(largest),
        Table(("shown", "bar", *(f"{name}, bytes" for name in NAMES)), parts),
        views,
        switch="Show",
        about="Bytes of tensors, of a method those of its largest rank. Other versions of the weights and activations: "
        "the most at one time, while mini-batches of a pipeline are in flight; of other methods not measured.",
        many=True,
    )


def by_rank(lines: Mapping[int, Mapping[str, Any]]) -> dict[int, Row]:
    """The bytes of each rank by purpose."""
    return {rank: _row(lines[rank]) for rank in sorted(lines)}


def _row(line: Mapping[str, Any]) -> Row:
    """The rest is of what a run has at its end: then no activations are left, and perhaps no other versions."""
    known = {name: line.get(field) or 0 for name, field in PURPOSES.items()}
    lasting = sum(known.values()) - known["activations"]
    return {**known, REST: max(0, line["bytes"] - lasting)}


def _largest(member: GroupedRun) -> Row:
    return max(by_rank(member.run.memory_lines).values(), key=lambda row: sum(row.values()))


def _part(label: str, names: list[str], rows: Sequence[Row]) -> ReportPart:
    return ReportPart((label,), (names, *([row[name] for row in rows] for name in NAMES)))


def _stacked(names: Sequence[str], rows: Sequence[Row]) -> Figure:
    """A bar for each name, the first one on top."""
    bars = [escaped(name) for name in names]
    ticks = {"tickvals": bars, "ticktext": [wrapped(name) for name in bars]}
    layout = {
        "barmode": "stack",
        "bargap": 0.3,
        "legend": {"orientation": "h", "traceorder": "normal"},
        "xaxis": axis("bytes", rangemode="tozero", tickformat="~s", ticksuffix="B"),
        "yaxis": {"automargin": True, "autorange": "reversed", "type": "category", **ticks},
        "height": 90 + 36 * max(len(bars), 3),
    }
    data = [_bars(number, name, bars, [row[name] for row in rows]) for number, name in enumerate(NAMES)]
    return {"data": data, "layout": layout}


def _bars(number: int, name: str, bars: list[str], sizes: list[int]) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": bars,
        "x": numbers(sizes),
        "marker": bar(number),
        "hovertemplate": f"%{{y}}<br>{name} %{{x:.4~s}}B<extra></extra>",
    }


def _summary(largest: Mapping[str, Row]) -> str:
    sizes = [f"{name} {bytes_text(sum(row.values()))}" for name, row in largest.items()]
    return f"Stacked bars of the memory of ranks by purpose; of the largest rank: {', '.join(sizes)}."
