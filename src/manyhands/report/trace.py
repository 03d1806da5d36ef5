"""Traces: the timeline of all ranks in the format that Perfetto and chrome://tracing read.

A process there is a host of a run, a thread is a rank. Times are microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from manyhands.report.groups import GroupedRun
from manyhands.report.moments import incidents, segments

Event = dict[str, Any]

MICRO = 1e6
DIGITS = 3
"""Decimals of a microsecond."""
SPAN = '{{"ph":"X","name":"{name}","ts":{ts},"dur":{dur},"pid":{pid},"tid":{tid},"args":{{{step}}}}}'


def trace(members: Sequence[GroupedRun]) -> Iterator[Event]:
    """The events of all runs."""
    pids: dict[tuple[int, int], int] = {}
    for number, member in enumerate(members):
        yield from _events(number, member, pids)


def write_trace(members: Sequence[GroupedRun], path: Path) -> None:
    """Write the events to a file, as an object with the unit of time."""
    with path.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        file.write(",\n".join(map(_text, trace(members))))
        file.write("\n]}\n")


def _text(event: Event) -> str:
    """One event as JSON. Spans, the bulk of the events, are formatted directly: their names need no escaping."""
    if event["ph"] != "X":
        return json.dumps(event, allow_nan=False)
    return SPAN.format(**event, step="".join(f'"step":{step}' for step in event["args"].values()))


def _events(number: int, member: GroupedRun, pids: dict[tuple[int, int], int]) -> Iterator[Event]:
    hosts = {one["rank"]: one.get("host", 0) for one in member.run.header["participants"]}
    hosts |= {rank: rank for rank in member.measures.by_rank if rank not in hosts}  # workers that joined later
    roles = {one["rank"]: one.get("role", "worker") for one in member.run.header["participants"]}
    for host in sorted(set(hosts.values())):
        pid = pids[number, host] = len(pids)
        yield _name("process", pid, 0, f"{member.label}, host {host}")
    thread = {rank: {"pid": pids[number, host], "tid": rank} for rank, host in hosts.items()}
    for rank, where in thread.items():
        yield _name("thread", where["pid"], rank, f"{member.run.rank_name(rank)} ({roles.get(rank, 'worker')})")
    for line in member.run.steps:
        for part in segments(line):
            yield _span(part.activity, part.start, part.start + part.seconds, thread[part.rank], step=part.step)
    for pause in member.run.pauses:
        rank = pause["paused"]
        yield _span("pause", pause["from"], pause["to"], thread.get(rank, {"pid": 0, "tid": rank}))
    for one in incidents(member.run):
        where = thread.get(one.rank, {"pid": pids[number, min(hosts.values())], "tid": one.rank})
        yield {"ph": "i", "s": "t", "name": one.text, "cat": one.kind, "ts": round(one.at * MICRO, DIGITS), **where}


def _name(kind: str, pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "name": f"{kind}_name", "pid": pid, "tid": tid, "args": {"name": name}}


def _span(name: str, start: float, stop: float, where: dict[str, int], **args: Any) -> Event:
    begin = round(start * MICRO, DIGITS)
    length = round(max(0.0, stop * MICRO - begin), DIGITS)
    return {"ph": "X", "name": name, "ts": begin, "dur": length, **where, "args": args}
