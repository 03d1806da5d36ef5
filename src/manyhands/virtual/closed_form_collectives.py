"""The collectives of the virtual world itself, charged by closed forms.

    L latency, G seconds per byte, m bytes of the vector, P ranks

    all_reduce       2 L (P - 1) + 2 m G (P - 1) / P       a ring
    reduce_scatter     L (P - 1) +   m G (P - 1) / P       the first half of it
    all_gather         L (P - 1) +   m G (P - 1) / P       the second half
    all_to_all         L (P - 1) +   s G                   s: the most that one rank sends to others
    broadcast          L (P - 1) +   m G                   a chain from the root: all ranks but the last one send m
    barrier            L ⌈lg P⌉                            by dissemination

They stand for what `torch.distributed` does in the real world: one call, no messages of ours. All ranks of a group
share one `CallGroup`, in which calls take place one after the other, so what a call costs does not grow with the group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from manyhands.core.errors import ManyhandsError, PeerLost
from manyhands.core.port import ReduceOp, even_spans
from manyhands.virtual.kernel import VirtualActivity

if TYPE_CHECKING:
    from manyhands.virtual.transport import VirtualTransport
    from manyhands.virtual.world import World

Arguments = Sequence[Tensor]
"""What one rank passes to a call."""
Compute = Callable[[list[Arguments]], Tensor | None]
"""Computes a call from the arguments of all ranks, in the order of the group; they may be written."""


class CollectiveCall:
    """One call, while its ranks arrive."""

    def __init__(self, name: str, compute: Compute) -> None:
        self.name = name
        self.compute = compute
        self.arguments: dict[int, Arguments] = {}
        self.nbytes = 0.0
        """The most that one rank sends."""
        self.waiting: list[VirtualActivity] = []
        self.result: Tensor | None = None


class CallGroup:
    """Identifies a group, whose ranks are in order, among the calls that are under way."""

    def __init__(self, group: Sequence[int]) -> None:
        self.group = group

    def __str__(self) -> str:
        return ", ".join(map(str, self.group))

    def missing(self, gone: Mapping[int, str]) -> int | None:
        """The first rank of the group that is gone."""
        return min((rank for rank in gone if rank in self.group), default=None) if gone else None


def in_order(group: Sequence[int]) -> Sequence[int]:
    """A group in the form that all its ranks give it; consecutive ranks are a range, which costs no memory."""
    if isinstance(group, range) and group.step == 1:
        return group
    ranks = tuple(sorted(group))
    consecutive = ranks[-1] - ranks[0] == len(ranks) - 1
    return range(ranks[0], ranks[-1] + 1) if consecutive else ranks


class ClosedFormCollective:
    """Collectives without messages: when all ranks have called, the result is there after the closed form's time."""

    def __init__(self, world: World, transport: VirtualTransport, group: Sequence[int]) -> None:
        self._world = world
        self._transport = transport
        ranks = in_order(group)
        self._size, self._index = len(ranks), ranks.index(transport.rank)
        self._group = world.call_groups.setdefault(ranks, CallGroup(ranks))

    def all_reduce(self, x: Tensor, op: ReduceOp = "sum") -> None:
        """Reduced in rank order, in place."""
        self._call("an all-reduce", (x,), 2 * (self._size - 1), 2 * self._share(x), partial(_all_reduce, op))

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Summed in rank order."""
        span = even_spans(x.numel(), self._size)[self._index]
        total = self._call("a reduce-scatter", (x,), self._size - 1, self._share(x), _total)
        return torch.empty_like(x[span]) if total is None else total[span].clone()

    def all_gather(self, mine: Tensor, out: Tensor) -> None:
        self._call("an all-gather", (mine, out), self._size - 1, self._share(out), _all_gather)

    def broadcast(self, x: Tensor, root: int) -> None:
        source = self._group.group.index(root)
        sends = (self._index + 1) % self._size != source
        nbytes = x.nbytes if sends else 0
        self._call("a broadcast", (x,), self._size - 1, nbytes, partial(_broadcast, source))

    def all_to_all(self, xs: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        nbytes = sum(x.nbytes for index, x in enumerate(xs) if index != self._index)
        self._call("an all-to-all", (*xs, *outs), self._size - 1, nbytes, _all_to_all)

    def barrier(self) -> None:
        self._call("a barrier", (), (self._size - 1).bit_length(), 0, lambda _: None)

    def _share(self, x: Tensor) -> float:
        """Bytes of all spans but the own one, if all are equal."""
        return x.nbytes * (self._size - 1) / self._size

    def _call(self, name: str, arguments: Arguments, hops: int, nbytes: float, compute: Compute) -> Tensor | None:
        """Wait for all ranks and for the time of `hops` latencies and `nbytes`, the most of any rank."""
        me, group, world = self._transport, self._group, self._world
        if (rank := group.missing(world.gone)) is not None:
            raise PeerLost(rank, world.gone[rank])
        world.kernel.may_wait(name)
        call = world.calls.setdefault(group, CollectiveCall(name, compute))
        if call.name != name:
            raise ManyhandsError(f"rank {me.rank} calls {name}, but others of ranks {group} {call.name}")
        call.arguments[me.rank] = arguments
        call.nbytes = max(call.nbytes, nbytes)
        call.waiting.append(world.kernel.current)
        me.bytes_sent += round(nbytes)
        if len(call.arguments) == self._size:
            del world.calls[group]
            latency, rate = world.link(group.group)
            seconds = hops * latency + call.nbytes / rate
            world.kernel.at(world.kernel.now + seconds, self._close, call)
        world.kernel.wait(f"{name} with ranks", group)
        return call.result

    def _close(self, call: CollectiveCall) -> None:
        """Compute the results and let all ranks continue."""
        arguments = [call.arguments[rank] for rank in self._group.group]
        if not any(x.is_meta for x in arguments[0]):
            with torch.no_grad():
                call.result = call.compute(arguments)
        for activity in call.waiting:
            self._world.kernel.wake(activity)


def _total(arguments: list[Arguments], op: ReduceOp = "sum") -> Tensor:
    total = arguments[0][0].clone()
    for (x,) in arguments[1:]:
        (torch.add if op == "sum" else torch.maximum)(total, x, out=total)
    return total


def _all_reduce(op: ReduceOp, arguments: list[Arguments]) -> None:
    total = _total(arguments, op)
    for (x,) in arguments:
        x.copy_(total)


def _all_gather(arguments: list[Arguments]) -> None:
    whole = torch.cat([mine for mine, _ in arguments])
    for _, out in arguments:
        out.copy_(whole)


def _broadcast(source: int, arguments: list[Arguments]) -> None:
    for index, (x,) in enumerate(arguments):
        if index != source:
            x.copy_(arguments[source][0])


def _all_to_all(arguments: list[Arguments]) -> None:
    for index, tensors in enumerate(arguments):
        for frm, out in enumerate(tensors[len(arguments) :]):
            out.copy_(arguments[frm][index])
