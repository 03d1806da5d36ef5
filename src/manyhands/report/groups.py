"""Groups: runs that differ in their seed only are one line of a table and one colour of a chart.

Groups of one method are told apart by what else differs: "ssp:staleness=3, 8 workers". What is never drawn on one axis
is kept in different sections: other tasks, and virtual seconds beside real ones.
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
from manyhands.report.reading import Run

ALIKE = ("method", "strategy", "workers", "servers", "replicas", "link", "cluster", "batch_size", "start", "steps")
"""What runs of one group have in common."""
SAID = {"workers": "{} worker{s}", "servers": "{} server{s}", "batch_size": "batches of {}", "steps": "{} step{s}"}


@dataclass(frozen=True)
class Member:
    """One run of a section, under the name that it has there."""

    run: Run
    name: str
    """Of its group."""
    label: str
    """Its own: name and seed."""
    place: int
    """Of its group: the colour."""

    @cached_property
    def measures(self) -> Measures:
        return Measures(self.run)


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seed only."""

    name: str
    place: int
    members: list[Member]

    @property
    def typical(self) -> Member:
        """The run in the middle: by accuracy or, where there is none, by loss. A failed one only if all are."""
        done = [member for member in self.members if member.run.failure is None] or self.members
        return sorted(done, key=_goodness)[len(done) // 2]

    def middle(self, values: Sequence[float | None]) -> float | None:
        """The median of those that there are."""
        found = [value for value in values if value is not None]
        return median(found) if found else None


@dataclass(frozen=True)
class Section:
    """Runs that may stand on one axis."""

    task: str
    virtual: bool
    groups: list[Group]
    slug: str
    """For ids and names of files."""
    target: Target | None = None

    @property
    def members(self) -> list[Member]:
        return [member for group in self.groups for member in group.members]

    @property
    def seconds(self) -> str:
        return "virtual seconds" if self.virtual else "seconds"

    @cached_property
    def totals(self) -> dict[int, dict[str, Any]]:
        """What each run came to, by the identity of the run."""
        found = {}
        for member in self.members:
            row = totals(member.run, self.target)
            found[id(member.run)] = row if member.run.held else {**row, "memory": None}
        return found

    def total(self, member: Member) -> dict[str, Any]:
        return self.totals[id(member.run)]


def _goodness(member: Member) -> tuple[float, float]:
    m = member.measures
    accuracy, loss = (float(curve.values[-1]) if len(curve.values) else 0.0 for curve in (m.accuracy, m.loss))
    return accuracy, -loss


def sections(runs: Sequence[Run], target: Target | None = None) -> list[Section]:
    """One for each task and kind of time, in the order of their first runs."""
    found: dict[tuple[str, bool], list[Run]] = {}
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


def _groups(runs: Sequence[Run]) -> list[Group]:
    alike: dict[str, list[Run]] = {}
    for run in runs:
        alike.setdefault(json.dumps([run.header.get(name) for name in ALIKE], default=str), []).append(run)
    sets = list(alike.values())
    names = _names([some[0] for some in sets])
    return [
        Group(name, place, _members(name, place, some))
        for place, (name, some) in enumerate(zip(names, sets, strict=True))
    ]


def _members(name: str, place: int, runs: Sequence[Run]) -> list[Member]:
    seeds = [run.seed for run in runs]
    labels = [f"{name}, seed {run.seed}" for run in runs]
    twins = [seeds.count(seed) > 1 for seed in seeds]
    folders = ["" if run.path is None else run.path.parent.name for run in runs]
    named = [
        f"{label} ({folder or n})" if twin else label
        for n, (label, twin, folder) in enumerate(zip(labels, twins, folders, strict=True), 1)
    ]
    return [Member(run, name, label, place) for run, label in zip(runs, named, strict=True)]


def _names(firsts: Sequence[Run]) -> list[str]:
    """Each group's method and, where several have the same, what tells it from the others."""
    names = []
    for run in firsts:
        twins = [other for other in firsts if other.method == run.method]
        differs = [key for key in ALIKE if len({json.dumps(twin.header.get(key), default=str) for twin in twins}) > 1]
        words = [word for key in differs for word in _words(key, run, twins)]
        names.append(", ".join([run.method, *words]))
    return [name if names.count(name) == 1 else f"{name} (no. {n})" for n, name in enumerate(names, 1)]


def _words(key: str, run: Run, twins: Sequence[Run]) -> list[str]:
    if key == "cluster":
        return _cluster_words([twin.header.get(key) or {} for twin in twins], run.header.get(key) or {})
    value = run.header.get(key)
    return [SAID[key].format(value, s="" if value == 1 else "s")] if key in SAID and value else []


def _cluster_words(all_of_them: Sequence[Mapping[str, Any]], one: Mapping[str, Any]) -> list[str]:
    """What is peculiar to this cluster; numbers are said, lists only named, and nothing is nothing peculiar."""
    words = []
    for key in sorted({key for cluster in all_of_them for key in cluster} - {"workers", "servers"}):
        values = {json.dumps(cluster.get(key), default=str) for cluster in all_of_them}
        if len(values) > 1 and (value := one.get(key)):
            words.append(f"with {key}" if isinstance(value, list | dict) else f"{key} {value}")
    return words
