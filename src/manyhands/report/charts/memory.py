"""The memory of each rank by purpose: weights, gradient, optimizer, versions of the weights, activations, and the rest.

Records of methods and versions that measured less have all of it as the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from manyhands.report.chart import Chart, Figure, Table, View
from manyhands.report.charts.stacked import ALL, Row, bar_table, stacked
from manyhands.report.groups import GroupedRun, Section
from manyhands.report.theme import bar, bytes_text

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


def memory(section: Section) -> Chart:
    """One view with the largest rank of every method, and one per run with its ranks."""
    largest = {group.name: _largest(group.typical) for group in section.groups if group.typical.run.memory_lines}
    views, parts = [View(ALL, _stacked(largest))], [bar_table(ALL, largest, NAMES)]
    for member in section.members:
        if rows := by_rank(member.run.memory_lines):
            ranks = sorted(sorted(rows, key=lambda rank: -sum(rows[rank].values()))[:MOST_RANKS])
            note = "" if len(rows) <= MOST_RANKS else f"Of {len(rows)} ranks the {MOST_RANKS} largest are drawn."
            views.append(View(member.label, _stacked({f"rank {rank}": rows[rank] for rank in ranks}), note))
            parts.append(bar_table(member.label, {f"rank {rank}": row for rank, row in rows.items()}, NAMES))
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


def by_rank(lines: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, int]]:
    """The bytes of each rank by purpose."""
    return {rank: _row(lines[rank]) for rank in sorted(lines)}


def _row(line: Mapping[str, Any]) -> dict[str, int]:
    """The rest is of what a run has at its end: then no activations are left, and perhaps no other versions."""
    known = {name: line.get(field) or 0 for name, field in PURPOSES.items()}
    lasting = sum(known.values()) - known["activations"]
    return {**known, REST: max(0, line["bytes"] - lasting)}


def _largest(member: GroupedRun) -> dict[str, int]:
    return max(by_rank(member.run.memory_lines).values(), key=lambda row: sum(row.values()))


def _stacked(bars: Mapping[str, Row]) -> Figure:
    markers = {name: bar(number) for number, name in enumerate(NAMES)}
    return stacked(bars, markers, "%{x:.4~s}B", title="bytes", tickformat="~s", ticksuffix="B")


def _summary(largest: Mapping[str, Row]) -> str:
    sizes = [f"{name} {bytes_text(sum(row.values()))}" for name, row in largest.items()]
    return f"Stacked bars of the memory of ranks by purpose; of the largest rank: {', '.join(sizes)}."
