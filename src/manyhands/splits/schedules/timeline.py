"""The timeline of a schedule: when each action runs if it waits only for its rank and its inputs.

    action        takes time      waits for
    F(m, s)       forward         F(m, s - 1)
    B(m, s)       backward        F(m, s), and B or I of m on stage s + 1
    I(m, s)       half of it      as B: only the error for the previous stage is computed
    W(m, s)       the other half  I(m, s): the gradient of the weights
    U(m, s)       none            B of all mini-batches since the last update, on each rank that has the stage
    L(m, s)       none            B(m, s + 1): a model of the errors learns; then B(m, s) has used a prediction of it
    T(m, s)       none            U(m, K - 1) of the last stage: permission to begin mini-batch m + 1
    A(m, s)       none            copies of the stage's weights are averaged after U(m, s)

A schedule that flushes has F, B, I and W only; its update follows when all of them are done.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from manyhands.core.errors import Deadlock


class Action(NamedTuple):
    """One pass, update or signal of one micro-batch on one stage."""

    op: str
    m: int
    stage: int


Rows = list[list[Action]]
"""For every rank its actions in order."""
Schedule = Callable[[int, int], Rows]
"""schedule(ranks, micro_batches)"""

SLOT = {"F": 1.0, "B": 1.0, "I": 1.0, "W": 1.0}
"""Every pass takes one slot of a picture; what is not listed takes none."""


class Timed(NamedTuple):
    """An action with its rank and the time it starts."""

    start: float
    rank: int
    action: Action


Duration = Callable[[Action], float]
"""How long an action takes."""


def one_slot(action: Action) -> float:
    """A slot for each pass."""
    return SLOT.get(action.op, 0.0)


def lasting(forward: float = 1, backward: float = 1) -> Duration:
    """Equal stages; a backward pass that is split takes as long in both halves together."""
    seconds = {"F": forward, "B": backward, "I": backward / 2, "W": backward / 2}
    return lambda action: seconds.get(action.op, 0.0)


def timeline(rows: Sequence[Sequence[Action]], duration: Duration = one_slot) -> list[Timed]:
    """Every action with its start, ordered by time."""
    last = max((action.stage for row in rows for action in row), default=0)
    updates = _updates(rows)
    predicted = {action[1:] for row in rows for action in row if action.op == "L"}
    ends: dict[Action, float] = {}
    position, free = [0] * len(rows), [0.0] * len(rows)
    timed: list[Timed] = []
    while any(position[rank] < len(row) for rank, row in enumerate(rows)):
        before = list(position)
        for rank, row in enumerate(rows):
            while position[rank] < len(row):
                action = row[position[rank]]
                ready = [_end_of_any(ends, some) for some in _inputs(action, last, predicted, updates)]
                if None in ready:
                    break
                start = max([free[rank], *(end for end in ready if end is not None)])
                ends[action] = free[rank] = start + duration(action)
                timed.append(Timed(start, rank, action))
                position[rank] += 1
        if position == before:
            raise Deadlock(f"the schedule is stuck at actions {position} of its rows")
    return sorted(timed, key=lambda one: one[:2])


def _updates(rows: Sequence[Sequence[Action]]) -> dict[Action, list[tuple[Action, ...]]]:
    """By update, the backward passes whose gradients it has; if replicas share it, those of all of them."""
    found: dict[Action, list[tuple[Action, ...]]] = {}
    for row in rows:
        since: list[tuple[Action, ...]] = []
        for action in row:
            if action.op == "B":
                since.append((action,))
            elif action.op == "U":
                found[action], since = [*found.get(action, []), *since], []
    return found


def _inputs(
    action: Action,
    last: int,
    predicted: Collection[tuple[int, int]],
    updates: Mapping[Action, list[tuple[Action, ...]]],
) -> list[tuple[Action, ...]]:
    """The actions that must have ended: of each tuple any one. The errors of some passes are predicted."""
    op, m, s = action
    if op == "F":
        return [(Action("F", m, s - 1),)] if s else []
    above: list[tuple[Action, ...]] = [(Action("B", m, s + 1), Action("I", m, s + 1))] if s < last else []
    if op in "BI":
        return [(Action("F", m, s),), *(above if (m, s) not in predicted else [])]
    if op == "L":
        return above
    if op == "U":
        return updates[action]
    if op == "W":
        return [(Action("I", m, s),)]
    return [(Action("U", m, last),)] if op == "T" and s < last else []


def _end_of_any(ends: Mapping[Action, float], some: Iterable[Action]) -> float | None:
    return next((ends[one] for one in some if one in ends), None)


def makespan(rows: Rows, forward: float = 1, backward: float = 1) -> float:
    """The time at which the last action ends, if all stages are equal."""
    return length(rows, lasting(forward, backward))


def length(rows: Rows, duration: Duration) -> float:
    """The time at which the last action ends."""
    return max(one.start + duration(one.action) for one in timeline(rows, duration))


def bubble(rows: Rows, forward: float = 1, backward: float = 1) -> float:
    """The share of all ranks' time in which they are idle, if all stages are equal."""
    return 1 - busy(rows, lasting(forward, backward)) / (len(rows) * makespan(rows, forward, backward))


def busy(rows: Rows, duration: Duration) -> float:
    """The time that all ranks compute."""
    return sum(duration(action) for row in rows for action in row)


def in_flight(row: Sequence[Action]) -> int:
    """The most micro-batches whose activations a rank stores, over all its stages: F is done, B, W or L is not."""
    ends = {action[1:]: number for number, action in enumerate(row) if action.op in "BWL"}
    now = most = 0
    for number, action in enumerate(row):
        now += (action.op == "F") - (ends.get(action[1:]) == number)
        most = max(most, now)
    return most


def staleness(row: Sequence[Action]) -> list[int]:
    """The updates of a stage between F(m) and B(m) for every m; without U in the row, each B is followed by one."""
    updates, seen, stale = dict[int, int](), dict[tuple[int, int], int](), dict[tuple[int, int], int]()
    update = "U" if any(action.op == "U" for action in row) else "B"
    for op, m, stage in row:
        now = updates.setdefault(stage, 0)
        if op == "F":
            seen[m, stage] = now
        elif op == "B":
            stale[m, stage] = now - seen[m, stage]
        updates[stage] += op == update
    return [stale[key] for key in sorted(stale)]


def picture(rows: Rows, width: int | None = None) -> str:
    """The schedule as a table of ranks, by their first stages, and slots of a pass; ' marks a rank's second stage.

    It is continued below after so many columns.
    """
    timed = [one for one in timeline(rows) if one.action.op in SLOT]
    cells = [["."] * (1 + max(round(one.start) for one in timed)) for _ in rows]
    for start, rank, (op, m, stage) in timed:
        cells[rank][round(start)] = f"{op}{m}{chr(39) * (stage // len(rows))}"
    size = max(len(cell) for line in cells for cell in line)
    heads = [f"s{row[0].stage if row else rank}" for rank, row in enumerate(rows)]
    head = max(map(len, heads))
    most = len(cells[0]) if width is None else max(1, (width - head) // (size + 1))
    blocks = [
        "\n".join(
            " ".join([name.ljust(head), *(cell.ljust(size) for cell in line[first : first + most])]).rstrip()
            for name, line in zip(heads, cells, strict=True)
        )
        for first in range(0, len(cells[0]), most)
    ]
    return "\n\n".join(blocks)
