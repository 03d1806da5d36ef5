"""The collectives of the virtual world itself, charged by the closed form of a ring.

    T = 2 L (P - 1) + 2 m G (P - 1) / P        L latency, G seconds per byte, m bytes, P ranks

They stand for what `torch.distributed` does in the real world: one call, no messages of ours. A group has one room for
all its ranks, where its calls take place one after the other, so what a call costs does not grow with the group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from manyhands.core.errors import PeerLost
from manyhands.virtual.kernel import Activity

if TYPE_CHECKING:
    from manyhands.virtual.transport import VirtualTransport
    from manyhands.virtual.world import World


class Meeting:
    """One collective call, while its ranks arrive."""

    def __init__(self) -> None:
        self.brought: dict[int, Tensor] = {}
        self.waiting: list[Activity] = []


class Room:
    """Where a group meets; the group is in order."""

    def __init__(self, group: Sequence[int]) -> None:
        self.group = group

    def __str__(self) -> str:
        return ", ".join(map(str, self.group))

    def missing(self, gone: Mapping[int, str]) -> int | None:
        """The first of the group that is not there."""
        return min((rank for rank in gone if rank in self.group), default=None) if gone else None


def in_order(group: Sequence[int]) -> Sequence[int]:
    """A group as all its ranks would write it; of neighbours only the first and the last are noted down."""
    if isinstance(group, range) and group.step == 1:
        return group
    ranks = tuple(sorted(group))
    together = ranks[-1] - ranks[0] == len(ranks) - 1
    return range(ranks[0], ranks[-1] + 1) if together else ranks


class Native:
    """All-reduce by decree: everyone meets, the sum is there after the closed form's time."""

    def __init__(self, world: World, transport: VirtualTransport, group: Sequence[int]) -> None:
        self._world = world
        self._transport = transport
        ranks = in_order(group)
        self._room = world.rooms.setdefault(ranks, Room(ranks))

    def all_reduce(self, x: Tensor) -> None:
        """Sum in rank order, in place."""
        me, room, world = self._transport, self._room, self._world
        if (rank := room.missing(world.gone)) is not None:
            raise PeerLost(rank, world.gone[rank])
        world.kernel.may_wait("an all-reduce")
        meeting = world.meetings.setdefault(room, Meeting())
        meeting.brought[me.rank] = x
        meeting.waiting.append(world.kernel.current)
        size = len(room.group)
        share = x.nbytes * (size - 1) / size
        me.bytes_sent += round(2 * share)
        if len(meeting.brought) == size:
            del world.meetings[room]
            latency, rate = world.link(room.group)
            seconds = 2 * latency * (size - 1) + 2 * share / rate
            world.kernel.at(world.kernel.now + seconds, self._close, meeting)
        world.kernel.wait("an all-reduce with ranks", room)

    def _close(self, meeting: Meeting) -> None:
        parts = [meeting.brought[rank] for rank in self._room.group]
        if not parts[0].is_meta:
            with torch.no_grad():
                total = parts[0].clone()
                for part in parts[1:]:
                    total += part
                for part in parts:
                    part.copy_(total)
        for activity in meeting.waiting:
            self._world.kernel.wake(activity)
