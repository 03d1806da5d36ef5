"""The timeline of a schedule: when each action runs if it waits only for its stage and its inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from manyhands.core.errors import Deadlock

Action = tuple[str, int]
"""("F", m): forward pass of micro-batch m; ("B", m): its backward pass."""
Rows = list[list[Action]]
"""For every stage its actions in order."""
Schedule = Callable[[int, int], Rows]
"""schedule(stages, micro_batches)"""


class Timed(NamedTuple):
    """An action with its stage and the time it starts."""

    start: float
    stage: int
    op: str
    m: int


def timeline(rows: Rows, forward: float = 1, backward: float = 1) -> list[Timed]:
    """Every action with its start, ordered by time."""
    seconds = {"F": forward, "B": backward}
    ends: dict[tuple[str, int, int], float] = {}
    position, free = [0] * len(rows), [0.0] * len(rows)
    timed: list[Timed] = []
    while any(position[s] < len(row) for s, row in enumerate(rows)):
        progress = False
        for s, row in enumerate(rows):
            while position[s] < len(row):
                op, m = row[position[s]]
                inputs = _inputs(op, s, m, len(rows))
                if any(action not in ends for action in inputs):
                    break
                start = max([free[s], *(ends[action] for action in inputs)])
                ends[op, s, m] = free[s] = start + seconds[op]
                timed.append(Timed(start, s, op, m))
                position[s] += 1
                progress = True
        if not progress:
            raise Deadlock(f"the schedule is stuck at actions {position} of its rows")
    return sorted(timed)


def _inputs(op: str, s: int, m: int, stages: int) -> list[tuple[str, int, int]]:
    """The actions that must have ended: of F that of the previous stage; of B the own F and B of the next stage."""
    if op == "F":
        return [("F", s - 1, m)] if s else []
    return [("F", s, m)] + ([("B", s + 1, m)] if s + 1 < stages else [])


def makespan(rows: Rows, forward: float = 1, backward: float = 1) -> float:
    """The time at which the last action ends."""
    seconds = {"F": forward, "B": backward}
    return max(one.start + seconds[one.op] for one in timeline(rows, forward, backward))


def bubble(rows: Rows, forward: float = 1, backward: float = 1) -> float:
    """The share of all stages' time in which they are idle."""
    busy = sum(forward if op == "F" else backward for row in rows for op, _ in row)
    return 1 - busy / (len(rows) * makespan(rows, forward, backward))


def in_flight(row: list[Action]) -> int:
    """The most micro-batches whose activations a stage stores: F is done, B is not."""
    now = most = 0
    for op, _ in row:
        now += 1 if op == "F" else -1
        most = max(most, now)
    return most


def staleness(row: list[Action]) -> list[int]:
    """The updates between F(m) and B(m) for every m, if each B is followed by an update."""
    seen: dict[int, int] = {}
    stale: dict[int, int] = {}
    for op, m in row:
        if op == "F":
            seen[m] = len(stale)
        else:
            stale[m] = len(stale) - seen[m]
    return [stale[m] for m in sorted(stale)]


def picture(rows: Rows) -> str:
    """The schedule as a table of stages and time slots, one action per slot."""
    cells = [["."] * round(makespan(rows)) for _ in rows]
    for start, s, op, m in timeline(rows):
        cells[s][round(start)] = f"{op}{m}"
    width = max(len(cell) for line in cells for cell in line)
    lines = (f"s{s} " + " ".join(cell.ljust(width) for cell in line) for s, line in enumerate(cells))
    return "\n".join(line.rstrip() for line in lines)
