"""Round robin: 1F1B without a flush, with stages that several ranks replicate (1F1B-RR of PipeDream).

    R = 3 ranks, M = 6 micro-batches, replicas = (2, 1)
    s0 F0 F2 .  B0 .  .  F4 B2 .  .  .  B4 .  .
    s0 F1 F3 .  .  .  B1 F5 .  .  B3 .  .  .  B5
    s1 .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 .

Mini-batch m goes to replica m mod r_s of stage s, and its backward pass returns there. With R ranks, a replica of it
begins with (R - 1 - (r_0 + .. + r_s-1)) // r_s forward passes of its own. A round of a stage is r_s mini-batches, one
for each replica. U(m), named after the first of them, updates with the sum of the gradients of all replicas; each of
them takes part, also in a last round that is not full.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count

from manyhands.splits.schedules.endless import EndlessRows, EndlessSchedule
from manyhands.splits.schedules.timeline import Action


def round_robin(ranks: int, replicas: Sequence[int] = (2,)) -> EndlessRows:
    """The row of every replica, stage by stage; stages that `replicas` does not have, have one."""
    rows: EndlessRows = []
    for stage, members in enumerate(placed(ranks, replicas)):
        rows += [_row(stage, replica, len(members), warm_up(ranks, members)) for replica in range(len(members))]
    return rows


def warm_up(ranks: int, members: Sequence[int]) -> int:
    """How many forward passes each of these replicas begins with."""
    return (ranks - 1 - members[0]) // len(members)


def placed(ranks: int, replicas: Sequence[int]) -> list[range]:
    """The ranks of every stage, in order, as long as there are any."""
    stages: list[range] = []
    start = 0
    while start < ranks:
        wanted = replicas[len(stages)] if len(stages) < len(replicas) else 1
        stages.append(range(start, min(ranks, start + wanted)))
        start = stages[-1].stop
    return stages


def _row(stage: int, replica: int, replicas: int, warm: int) -> Iterator[Action]:
    def own(op: str, number: int) -> Action:
        return Action(op, number * replicas + replica, stage)

    for number in range(warm):
        yield own("F", number)
    for number in count():
        yield own("F", warm + number)
        yield own("B", number)
        yield Action("U", number * replicas, stage)


EXAMPLES: Mapping[str, EndlessSchedule] = {"round_robin": round_robin}
