"""The collectives of the virtual world itself, charged by the closed form of a ring.

    T = 2 L (P - 1) + 2 m G (P - 1) / P        L latency, G seconds per byte, m bytes, P ranks

They stand for what `torch.distributed` does in the real world: one call, no messages of ours.
"""

from __future__ import annotations

from collections.abc import Sequence
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

    def __init__(self, group: tuple[int, ...]) -> None:
        self.group = group
        self.brought: dict[int, Tensor] = {}
        self.waiting: list[Activity] = []


class Native:
    """All-reduce by decree: everyone meets, the sum is there after the closed form's time."""

    def __init__(self, world: World, transport: VirtualTransport, group: Sequence[int]) -> None:
        self._world = world
        self._transport = transport
        self._group = tuple(sorted(group))

    def all_reduce(self, x: Tensor) -> None:
        """Sum in rank order, in place."""
        me, group, world = self._transport, self._group, self._world
        for rank in group:
            if why := world.why_gone(rank):
                raise PeerLost(rank, why)
        world.kernel.may_wait("an all-reduce")
        meeting = world.meetings.setdefault(group, Meeting(group))
        meeting.brought[me.rank] = x
        meeting.waiting.append(world.kernel.current)
        nbytes = x.nbytes
        share = nbytes * (len(group) - 1) / len(group)
        me.bytes_sent += round(2 * share)
        if len(meeting.brought) == len(group):
            del world.meetings[group]
            latency, rate = world.link(group)
            seconds = 2 * latency * (len(group) - 1) + 2 * share / rate
            world.kernel.at(world.kernel.now + seconds, self._close, meeting)
        world.kernel.wait("an all-reduce with ranks", ", ".join(map(str, group)))

    def _close(self, meeting: Meeting) -> None:
        parts = [meeting.brought[rank] for rank in meeting.group]
        if not parts[0].is_meta:
            with torch.no_grad():
                total = parts[0].clone()
                for part in parts[1:]:
                    total += part
                for part in parts:
                    part.copy_(total)
        for activity in meeting.waiting:
            self._world.kernel.wake(activity)
