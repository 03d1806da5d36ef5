"""The table at the head of a report: each group's medians over its seeds, the best first, failed runs at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from manyhands.report.groups import GroupedRun, RunGroup, Section
from manyhands.report.ranking import standing
from manyhands.report.theme import bytes_text, count_text, seconds_text, share_text

Row = dict[str, Any]
Show = Callable[[float | None], str]

WITHOUT = {"seconds_to_target": "not reached", "mean_lag": "-"}
"""What a cell says where no run has a value."""
LARGEST = {"mean_lag": "max_lag", "mean_apart": "max_apart"}
"""Means, each with the measure that is its largest value."""


@dataclass(frozen=True)
class Column:
    """One measure of `totals`, with its title and format."""

    key: str
    title: str
    show: Show


@dataclass(frozen=True)
class Cell:
    """A median, and the range over seeds if there are several."""

    text: str
    spread: str = ""


@dataclass(frozen=True)
class SummaryLine:
    """One row: a group's finished runs, or one failed run."""

    name: str
    seeds: str
    cells: list[Cell]
    failure: str = ""


def columns(section: Section) -> list[Column]:
    """The columns of the table; those without any value are left out."""
    s = "virtual s" if section.virtual else "s"
    every = [
        Column("seconds_to_target", f"time to {section.target}", seconds_text),
        Column("samples_to_target", "samples to it", count_text),
        Column("accuracy", "accuracy", share_text),
        Column("loss", "loss", count_text),
        Column("seconds", "virtual time" if section.virtual else "time", seconds_text),
        Column("samples_per_second", f"samples per {s}", count_text),
        Column("bytes", "sent", bytes_text),
        Column("mean_lag", "lag", count_text),
        Column("dropped", "dropped gradients", count_text),
        Column("mean_apart", "shards apart", count_text),
        Column("waiting", "waiting", share_text),
        Column("memory", "memory of a rank", bytes_text),
    ]
    rows = [section.total(member) for member in section.members]
    wanted = [column for column in every if section.target is not None or not column.key.endswith("_to_target")]
    return [c for c in wanted if c.key == "seconds_to_target" or any(_says(row[c.key], c) for row in rows)]


def _says(value: float | None, column: Column) -> bool:
    """Whether the column is worth its room for this value: most methods drop no gradient."""
    return value is not None and (value != 0 or column.key != "dropped")


def lines(section: Section) -> list[SummaryLine]:
    """All rows, in the order of the ranking."""
    shown = columns(section)
    done = [(group, [m for m in group.members if m.run.failure is None]) for group in section.groups]
    ranked = sorted(((g, ms) for g, ms in done if ms), key=lambda pair: _standing(section, pair[0].members))
    failed = [member for member in section.members if member.run.failure is not None]
    return [_finished(section, group, members, shown) for group, members in ranked] + [
        _failed(section, member, shown) for member in failed
    ]


def _standing(section: Section, members: Sequence[GroupedRun]) -> tuple[float, ...]:
    return standing([section.total(member) for member in members], section.target)


def _finished(section: Section, group: RunGroup, members: Sequence[GroupedRun], shown: Sequence[Column]) -> SummaryLine:
    rows = [section.total(member) for member in members]
    seeds = ", ".join(str(member.run.seed) for member in sorted(members, key=lambda member: member.run.seed))
    return SummaryLine(group.name, seeds, [_cell(column, rows, group) for column in shown])


def _cell(column: Column, rows: Sequence[Row], group: RunGroup) -> Cell:
    values = [row[column.key] for row in rows]
    found = [value for value in values if value is not None]
    if not found:
        return Cell(WITHOUT.get(column.key, ""))
    spread = _range(column.show(min(found)), column.show(max(found)))
    if (largest := LARGEST.get(column.key)) is not None:
        spread = f"at most {most}" if (most := max(row[largest] or 0 for row in rows)) else ""
    if column.key == "seconds_to_target" and len(found) < len(values):
        spread = f"{len(found)} of {len(values)} seeds{': ' if spread else ''}{spread}"
    return Cell(column.show(group.middle(found)), spread)


def _range(low: str, high: str) -> str:
    """The range as text; a unit that both ends share is given once."""
    if low == high:
        return ""
    (first, _, unit), (_, _, same) = low.partition(" "), high.partition(" ")
    return f"{first if unit == same else low} to {high}"


def _failed(section: Section, member: GroupedRun, shown: Sequence[Column]) -> SummaryLine:
    row = section.total(member)
    cells = [Cell(column.show(row[column.key])) for column in shown]
    return SummaryLine(member.name, str(member.run.seed), cells, member.run.failure or "")
