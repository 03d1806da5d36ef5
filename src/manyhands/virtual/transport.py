"""The port in virtual time: one rank's mailbox, lanes, memory and share of a host's cores."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from manyhands.core.errors import ManyhandsError, MayNotWait, PeerLost, refuse_unless
from manyhands.core.lending import inside_backward
from manyhands.core.protocols import ANY, Collective, Meta, Tag
from manyhands.virtual.kernel import Activity
from manyhands.virtual.mailbox import Mailbox
from manyhands.virtual.messages import Lane, VirtualMessage
from manyhands.virtual.native import Native

if TYPE_CHECKING:
    from manyhands.virtual.world import World


class Waiter:
    """An activity that waits for a message."""

    __slots__ = ("activity", "frm", "tags")

    def __init__(self, activity: Activity, tags: tuple[Tag, ...], frm: int) -> None:
        self.activity = activity
        self.tags = tags
        self.frm = frm

    def __str__(self) -> str:
        sender = "any rank" if self.frm == ANY else f"rank {self.frm}"
        return f"{' or '.join(map(str, self.tags))} from {sender}"

    def wants(self, message: VirtualMessage) -> bool:
        return message.tag in self.tags and self.frm in (ANY, message.frm)

    def clashes(self, other: Waiter) -> bool:
        same_sender = self.frm == other.frm or ANY in (self.frm, other.frm)
        return same_sender and not set(self.tags).isdisjoint(other.tags)


class VirtualTransport:
    """One rank of a virtual cluster."""

    plays = True

    def __init__(self, world: World, rank: int, speed: float) -> None:
        self.rank = rank
        self.size = world.cluster.size
        self.roles: Sequence[str] = world.roles
        self.role = world.roles[rank]
        self.late: Collection[int] = world.cluster.late
        self.hosts: Sequence[int] = world.hosts
        self.host = world.hosts[rank]
        self.bytes_sent = 0
        self.depth = 0
        self.speed = speed
        self.activities: list[Activity] = []
        self._world = world
        self._kernel = world.kernel
        self._queue = Mailbox()
        self._waiters: list[Waiter] = []
        self._lanes: dict[tuple[int, str], Lane] = {}
        self._in_flight = 0
        self._flushing: list[Activity] = []
        self._debt = 0.0
        self._sending = 0.0
        self._cpu_per_byte = world.cluster.cpu_per_byte
        jitter = world.cluster.jitter
        self._noise = random.Random(f"{world.seed}/{rank}/jitter") if jitter else None
        self._turns = world.turns(rank)

    # -- messages ---------------------------------------------------------------------------------

    def send(self, to: int, tag: Tag, meta: Meta = (), tensors: Sequence[Tensor] = (), *, latest: bool = False) -> None:
        lane = self._lanes.get((to, tag.name))
        if lane is None:
            lane = self._lanes[to, tag.name] = Lane()
        if latest and lane.last is not None and not lane.last.received:
            lane.last.load(tag, meta, tensors)
            self._world.ranks[to].look_again(lane.last)
            return
        gone = self._world.gone
        while lane.out >= tag.credit and to not in gone:
            self._kernel.may_wait("credit to send", tag, "to rank", to)
            self._await_credit(to, tag, lane)
        if to in gone:
            return
        lane.out += 1
        message = lane.last = VirtualMessage(self._kernel, lane, self.rank, tag, meta, tensors, self.depth + 1)
        if to == self.rank:
            self.deliver(message)
            return
        self.bytes_sent += message.nbytes
        self._in_flight += 1
        if self._cpu_per_byte:
            self._charge(to, message.nbytes)
        self._world.network.carry(self.rank, to, message.nbytes, (self, to, message))

    def _await_credit(self, to: int, tag: Tag, lane: Lane) -> None:
        """It counts as sending, not as waiting for others."""
        me, began = self._kernel.current, self._kernel.now
        waited = me.waited
        lane.blocked.append(me)
        try:
            self._wait_on(to, "credit to send", tag, "to rank", to)
        finally:
            me.waited = waited
            if me is self.activities[0]:
                self._sending += self._kernel.now - began

    def recv(self, *tags: Tag, frm: int = ANY, timeout: float | None = None) -> VirtualMessage | None:
        if inside_backward():
            raise MayNotWait(f"rank {self.rank} may not receive inside a backward pass")
        message = self._queue.take(tags, frm) if self._queue else None
        if message is None:
            self._tell_loss(frm)
            message = self._wait_for(Waiter(self._kernel.current, tags, frm), timeout)
            if message is None:
                return None
        message.received = True
        if message.depth > self.depth:
            self.depth = message.depth
        if not message.tensors:
            message.release()
        if self._cpu_per_byte:
            self._charge(message.frm, message.nbytes)
        return message

    def _wait_for(self, waiter: Waiter, timeout: float | None) -> VirtualMessage | None:
        for other in self._waiters:
            if waiter.clashes(other):
                raise ManyhandsError(f"two activities of rank {self.rank} wait for {waiter.tags[0]} at once")
        self._waiters.append(waiter)
        if timeout is not None:
            self._kernel.at(self._kernel.now + timeout, self._give_up, waiter)
        try:
            message: VirtualMessage | None = self._wait_on(waiter.frm, waiter)
        except BaseException:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            raise
        return message

    def _wait_on(self, rank: int, *why: Any) -> Any:
        """Wait, and hear of it if this rank leaves meanwhile."""
        watchers = self._world.watchers[rank]
        watchers[self] = watchers.get(self, 0) + 1
        try:
            return self._kernel.wait(*why)
        finally:
            watchers[self] -= 1
            if not watchers[self]:
                del watchers[self]

    def _give_up(self, waiter: Waiter) -> None:
        if waiter in self._waiters:
            self._waiters.remove(waiter)
            self._kernel.wake(waiter.activity)

    def deliver(self, message: VirtualMessage) -> None:
        """A message has arrived: hand it to whoever waits for it, or queue it."""
        for waiter in self._waiters:
            if waiter.wants(message):
                self._waiters.remove(waiter)
                self._kernel.wake(waiter.activity, message)
                return
        self._queue.add(message)

    def look_again(self, message: VirtualMessage) -> None:
        """A message was replaced: if it had arrived, somebody may be waiting for it now."""
        if message in self._queue:
            self._queue.remove(message)
            self.deliver(message)

    def sent(self) -> None:
        """One message of this rank has arrived or was dropped."""
        self._in_flight -= 1
        if not self._in_flight:
            while self._flushing:
                self._kernel.wake(self._flushing.pop())

    # -- losses -----------------------------------------------------------------------------------

    def _tell_loss(self, frm: int) -> None:
        me, lost = self._kernel.current, self._world.lost
        if frm == ANY and me.losses_told < len(lost):
            me.losses_told += 1
            raise PeerLost(*lost[me.losses_told - 1])
        if frm != ANY and (why := self._world.why_gone(frm)):
            raise PeerLost(frm, why)

    def notice(self, rank: int, why: str, lost: bool) -> None:
        """Another rank is gone: wake whoever waits for it, and free what was to be sent to it."""
        for waiter in list(self._waiters):
            if waiter.frm == rank or (lost and waiter.frm == ANY):
                if waiter.frm == ANY:
                    waiter.activity.losses_told += 1
                self._waiters.remove(waiter)
                self._kernel.wake(waiter.activity, PeerLost(rank, why))
        for (to, _), lane in self._lanes.items():
            while to == rank and lane.blocked:
                self._kernel.wake(lane.blocked.popleft())

    # -- memory, cores, time ----------------------------------------------------------------------

    def slot(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype)

    def shared(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        return self._world.shared(self.host, name, numel, dtype)

    @contextmanager
    def lock(self, name: str) -> Iterator[None]:
        queue = self._world.locks.setdefault((self.host, name), deque())
        queue.append(self._kernel.current)
        try:
            if len(queue) > 1:
                self._kernel.wait("the lock", name)
            yield
        finally:
            was_first = queue[0] is self._kernel.current
            queue.remove(self._kernel.current)
            if queue and was_first:
                self._kernel.wake(queue[0])

    def spawn(self, activity: Callable[[], None], *, daemon: bool = False) -> Activity:
        name = f"{self.role} {self.rank} ({getattr(activity, '__name__', 'activity')})"
        return self._start(activity, name, daemon)

    def _start(self, run: Callable[[], None], name: str, daemon: bool = False) -> Activity:
        activity = self._kernel.spawn(run, name, self.rank, daemon)
        self.activities.append(activity)
        return activity

    def begin(self, program: Callable[[], None]) -> None:
        """Start the rank's main program."""
        self._start(program, f"{self.role} {self.rank}")

    def spend(self, seconds: float, *, moving: bool = False) -> None:
        if inside_backward():
            raise MayNotWait(f"rank {self.rank} may not spend time inside a backward pass")
        refuse_unless(seconds >= 0, "seconds to spend", seconds, ">= 0")
        if self._turns is not None:
            if not moving and self.role == "worker":
                self._kernel.sleep_until(next(self._turns))
        elif seconds or self._debt:
            noise = math.exp(self._world.cluster.jitter * self._noise.gauss(0, 1)) if self._noise else 1.0
            seconds, self._debt = seconds * noise + self._debt, 0.0
            self._world.cores[self.host].spend(seconds / self.speed)

    def _charge(self, other: int, nbytes: int) -> None:
        """The cores' part of moving bytes between hosts; inside a backward pass it is paid later."""
        cost = nbytes * self._cpu_per_byte
        if cost and self.hosts[other] != self.host:
            if inside_backward():
                self._debt += cost
            else:
                began = self._kernel.now
                self.spend(cost, moving=True)
                if self._kernel.current is self.activities[0]:
                    self._sending += self._kernel.now - began

    def flush(self) -> None:
        if self._in_flight:
            self._kernel.may_wait("its messages to arrive")
            self._flushing.append(self._kernel.current)
            self._kernel.wait("its messages to arrive")

    def leave(self) -> None:
        for activity in self.activities[1:]:
            if not activity.daemon:
                activity.join()
        self.flush()
        self._world.leave(self.rank)

    def now(self) -> float:
        return self._kernel.now

    def waited(self) -> float:
        """Seconds that the main program has waited for others."""
        return self.activities[0].waited

    def sending(self) -> float:
        """Seconds that the main program has spent in `send`, and on the bytes it has received."""
        return self._sending

    def peers(self, role: str | None = None) -> Sequence[int]:
        return self._world.present.others(role, self.rank)

    def collective(self, group: Sequence[int]) -> Collective:
        return Native(self._world, self, group)
