"""Groups: runs that differ in their seed only are one line of a table and one colour of a chart.

Groups of one method are named by the settings in which they differ: "ssp:staleness=3, 8 workers". Different tasks, and
virtual and real seconds, are never drawn on one axis: they have sections of their own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any

from manyhands.report.measures import Measures, Target, totals
from manyhands.report.reading import RecordedRun

ALIKE = ("method", "strategy", "workers", "servers", "replicas", "link", "cluster", "batch_size", "start", "steps")
"""Fields of the header that are equal in all runs of a group."""
SAID = {"workers": "{} worker{s}", "servers": "{} server{s}", "batch_size": "batches of {}", "steps": "{} step{s}"}


@dataclass(frozen=True)
class GroupedRun:
    """One run of a section, with its names there."""

    run: RecordedRun
    name: str
    """The name of its group."""
    label: str
    """The name of the run: group and seed."""
    index: int
    """The index of its group, which determines the colour."""

    @cached_property
    def measures(self) -> Measures:
        return Measures(self.run)


@dataclass(frozen=True)
class RunGroup:
    """Runs that differ in their seed only."""

    name: str
    index: int
    members: list[GroupedRun]

    @property
    def typical(self) -> GroupedRun:
        """The median run, by accuracy or, without one, by loss. A failed run only if all have failed."""
        done = [member for member in self.members if member.run.failure is None] or self.members
        return sorted(done, key=_goodness)[len(done) // 2]

    def middle(self, values: Sequence[float | None]) -> float | None:
        """The median of the values that are not None."""
        found = [value for value in values if value is not None]
        return median(found) if found else None


@dataclass(frozen=True)
class Section:
    """Runs that may be drawn on one axis: of one task, in one kind of time."""

    task: str
    virtual: bool
    groups: list[RunGroup]
    slug: str
    """The name in ids and file names."""
    target: Target | None = None

    @property
    def members(self) -> list[GroupedRun]:
        return [member for group in self.groups for member in group.members]

    @property
    def seconds(self) -> str:
        return "virtual seconds" if self.virtual else "seconds"

    @cached_property
    def totals(self) -> dict[int, dict[str, Any]]:
        """The totals of each run, by the identity of the run."""
        found = {}
        for member in self.members:
            row = totals(member.run, self.target)
            found[id(member.run)] = row if member.run.memory else {**row, "memory": None}
        return found

    def total(self, member: GroupedRun) -> dict[str, Any]:
        return self.totals[id(member.run)]


def _goodness(member: GroupedRun) -> tuple[float, float]:
    m = member.measures
    accuracy, loss = (float(curve.values[-1]) if len(curve.values) else 0.0 for curve in (m.accuracy, m.loss))
    return accuracy, -loss


def sections(runs: Sequence[RecordedRun], target: Target | None = None) -> list[Section]:
    """One section for each task and kind of time, in the order of their first runs."""
    found: dict[tuple[str, bool], list[RecordedRun]] = {}
    for run in runs:
        found.setdefault((run.task, run.header.get("world") == "virtual"), []).append(run)
    made: list[Section] = []
    for (task, virtual), some in found.items():
        slug = _slug(task, virtual)
        taken = sum(re.sub(r"-\d+$", "", section.slug) == slug for section in made)
        made.append(Section(task, virtual, _groups(some), f"{slug}-{taken + 1}" if taken else slug, target))
    return made


def _slug(task: str, virtual: bool) -> str:
    word = re.sub(r"[^a-z0-9]+", "-", task.lower()).strip("-") or "task"
    return f"{word}-{'virtual' if virtual else 'real'}"


def _groups(runs: Sequence[RecordedRun]) -> list[RunGroup]:
    alike: dict[str, list[RecordedRun]] = {}
    for run in runs:
        alike.setdefault(json.dumps([run.header.get(name) for name in ALIKE], default=str), []).append(run)
    sets = list(alike.values())
    names = _names([some[0] for some in sets])
    return [
        RunGroup(name, index, _members(name, index, some))
        for index, (name, some) in enumerate(zip(names, sets, strict=True))
    ]


def _members(name: str, index: int, runs: Sequence[RecordedRun]) -> list[GroupedRun]:
    seeds = [run.seed for run in runs]
    labels = [f"{name}, seed {run.seed}" for run in runs]
    twins = [seeds.count(seed) > 1 for seed in seeds]
    folders = ["" if run.path is None else run.path.parent.name for run in runs]
    named = [
        f"{label} ({folder or n})" if twin else label
        for n, (label, twin, folder) in enumerate(zip(labels, twins, folders, strict=True), 1)
    ]
    return [GroupedRun(run, name, label, index) for run, label in zip(runs, named, strict=True)]


def _names(firsts: Sequence[RecordedRun]) -> list[str]:
    """The method of each group and, where several groups have the same one, the settings in which they differ."""
    names = []
    for run in firsts:
        twins = [other for other in firsts if other.method == run.method]
        differs = [key for key in ALIKE if len({json.dumps(twin.header.get(key), default=str) for twin in twins}) > 1]
        words = [word for key in differs for word in _words(key, run, twins)]
        names.append(", ".join([run.method, *words]))
    return [name if names.count(name) == 1 else f"{name} (no. {n})" for n, name in enumerate(names, 1)]


def _words(key: str, run: RecordedRun, twins: Sequence[RecordedRun]) -> list[str]:
    if key == "cluster":
        return _cluster_words([twin.header.get(key) or {} for twin in twins], run.header.get(key) or {})
    value = run.header.get(key)
    return [SAID[key].format(value, s="" if value == 1 else "s")] if key in SAID and value else []


def _cluster_words(all_of_them: Sequence[Mapping[str, Any]], one: Mapping[str, Any]) -> list[str]:
    """The settings in which this cluster differs: numbers with their value, lists and tables by name."""
    words = []
    for key in sorted({key for cluster in all_of_them for key in cluster} - {"workers", "servers"}):
        values = {json.dumps(cluster.get(key), default=str) for cluster in all_of_them}
        if len(values) > 1 and (value := one.get(key)):
            words.append(f"with {key}" if isinstance(value, list | dict) else f"{key} {value}")
    return words
