"""How to repeat the runs of a report: commands, versions, machines, clusters, remarks and warnings of the records."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from manyhands.report.groups import GroupedRun
from manyhands.report.theme import bytes_text

Facts = list[tuple[str, list[str]]]


def facts(members: Sequence[GroupedRun], notes: Sequence[str]) -> Facts:
    """Titles, each with its texts; a text that several runs share is given once."""
    made = [member.run.header.get("made") or {} for member in members]
    found = [
        ("Commands", _once(one.get("command") or "" for one in made)),
        ("Seeds", [", ".join(map(str, sorted({member.run.seed for member in members})))]),
        ("Versions", _once(_versions(one.get("versions") or {}) for one in made)),
        ("Machine", _once(_machine(one.get("machine") or {}) for one in made)),
        ("Cluster", _once(_cluster(member) for member in members)),
        ("Method", _once(f"{member.name}: {member.run.header.get('strategy', '')}" for member in members)),
        ("Size", _once(_size(member) for member in members)),
        ("Started", _span([one["started"] for one in made if one.get("started")])),
        ("Remarks", _once(str(remark) for member in members for remark in member.run.header.get("remarks") or [])),
        ("Records", [f"{member.label}: {member.run.path}" for member in members if member.run.path is not None]),
        ("Notes", list(notes)),
    ]
    return [(title, texts) for title, texts in found if texts]


def warnings(members: Sequence[GroupedRun]) -> list[str]:
    """Damage of the records, and lost ranks."""
    damage = [f"{member.label}: {text}" for member in members for text in member.run.warnings]
    lost = [
        f"{m.label}: rank {rank} is lost: {why}" for m in members for rank, why in m.run.lost if m.run.failure is None
    ]
    return damage + lost


def _once(texts: Any) -> list[str]:
    return list(dict.fromkeys(text for text in texts if text))


def _span(moments: list[str]) -> list[str]:
    if not moments:
        return []
    first, last = min(moments), max(moments)
    return [first if first == last else f"{first} to {last}"]


def _versions(versions: dict[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items() if version)


def _machine(machine: dict[str, Any]) -> str:
    memory = machine.get("memory_bytes")
    words = [machine.get("platform"), machine.get("processor"), f"{machine.get('cores')} cores", bytes_text(memory)]
    return ", ".join(str(word) for word in words if word) if machine else ""


def _cluster(member: GroupedRun) -> str:
    cluster = member.run.header.get("cluster")
    if cluster is None:
        return f"processes of one machine, link {member.run.header.get('link')}"
    return json.dumps(
        {name: value for name, value in cluster.items() if value not in (None, [], 0.0)}, ensure_ascii=False
    )


def _size(member: GroupedRun) -> str:
    h = member.run.header
    ranks = f"{h.get('workers')} workers, {h.get('servers', 0)} servers"
    steps = "" if h.get("steps") is None else f"{h['steps']} steps, "  # unknown in a loop of the user's own
    sizes = f"{ranks}, {steps}batches of {h.get('batch_size')}"
    every = f", evaluated every {h['evaluate_every']} steps" if h.get("evaluate_every") else ""
    return f"{member.name}: {sizes}{every}"
