"""The transport of virtual time: one rank's mailbox, channels, memory and share of a host's cores."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from manyhands.core.errors import ManyhandsError, MayNotWait, PeerLost, refuse_unless
from manyhands.core.port import ANY, REFERENCE_BYTES, Collective, Meta, Tag, inside_backward, matches, overlap
from manyhands.virtual.closed_form_collectives import ClosedFormCollective
from manyhands.virtual.kernel import VirtualActivity
from manyhands.virtual.mailbox import VirtualMailbox
from manyhands.virtual.messages import VirtualChannel, VirtualMessage

if TYPE_CHECKING:
    from manyhands.virtual.world import World


class VirtualReceive:
    """An activity that waits for a message."""

    __slots__ = ("activity", "frm", "tags")

    def __init__(self, activity: VirtualActivity, tags: tuple[Tag, ...], frm: int) -> None:
        self.activity = activity
        self.tags = tags
        self.frm = frm

    def __str__(self) -> str:
        sender = "any rank" if self.frm == ANY else f"rank {self.frm}"
        return f"{' or '.join(map(str, self.tags))} from {sender}"

    def wants(self, message: VirtualMessage) -> bool:
        return self.frm in (ANY, message.frm) and matches(message.tag, self.tags)

    def clashes(self, other: VirtualReceive) -> bool:
        same_sender = self.frm == other.frm or ANY in (self.frm, other.frm)
        return same_sender and overlap(self.tags, other.tags)


class VirtualTransport:
    """One rank of a virtual cluster."""

    is_simulated = True

    def __init__(self, world: World, rank: int, speed: float) -> None:
        self.rank = rank
        self.size = world.cluster.size
        self.roles: Sequence[str] = world.roles
        self.role = world.roles[rank]
        self.pending_ranks: Collection[int] = world.cluster.pending_ranks
        self.hosts: Sequence[int] = world.hosts
        self.host = world.hosts[rank]
        self.bytes_sent = 0
        self.depth = 0
        self.speed = speed
        self.activities: list[VirtualActivity] = []
        self._world = world
        self._kernel = world.kernel
        self._cores = world.cores[self.host]
        self._queue = VirtualMailbox()
        self._waiters: list[VirtualReceive] = []
        self._channels: dict[tuple[int, str], VirtualChannel] = {}
        self._in_flight = 0
        self._flushing: list[VirtualActivity] = []
        self._deferred = 0.0
        self._sending = 0.0
        self._cpu_per_byte = world.cluster.cpu_per_byte
        jitter = world.cluster.jitter
        self._noise = random.Random(f"{world.seed}/{rank}/jitter") if jitter else None
        self._turns = world.turns(rank)

    # -- messages ---------------------------------------------------------------------------------

    def send(self, to: int, tag: Tag, meta: Meta = (), tensors: Sequence[Tensor] = (), *, latest: bool = False) -> None:
        channel = self._channels.get((to, tag.name))
        if channel is None:
            channel = self._channels[to, tag.name] = VirtualChannel()
        if latest and channel.last is not None and not channel.last.received:
            channel.last.load(tag, meta, tensors)
            self._world.ranks[to].redeliver(channel.last)
            return
        gone = self._world.gone
        while channel.in_flight >= tag.credit and to not in gone:
            self._kernel.may_wait("credit to send", tag, "to rank", to)
            self._await_credit(to, tag, channel)
        if to in gone:
            return
        channel.in_flight += 1
        message = channel.last = VirtualMessage(self._kernel, channel, self.rank, tag, meta, tensors, self.depth + 1)
        if to == self.rank:
            self.deliver(message)
            return
        self.bytes_sent += message.nbytes
        self._in_flight += 1
        if self._cpu_per_byte:
            self._charge_link(to, message.nbytes)
        self._world.network.carry(self.rank, to, message.nbytes, (self, to, message))

    def _await_credit(self, to: int, tag: Tag, channel: VirtualChannel) -> None:
        """Wait for credit; it counts as time spent sending, not as waiting for others."""
        me, began = self._kernel.current, self._kernel.now
        waited = me.waited
        channel.blocked.append(me)
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
            self._raise_loss(frm)
            message = self._wait_for(VirtualReceive(self._kernel.current, tags, frm), timeout)
            if message is None:
                return None
        message.received = True
        if message.depth > self.depth:
            self.depth = message.depth
        if not message.tensors:
            message.release()
        if self._cpu_per_byte:
            self._charge_link(message.frm, message.nbytes)
        return message

    def _wait_for(self, waiter: VirtualReceive, timeout: float | None) -> VirtualMessage | None:
        for other in self._waiters:
            if waiter.clashes(other):
                raise ManyhandsError(f"two activities of rank {self.rank} wait for {waiter.tags[0]} at the same time")
        self._waiters.append(waiter)
        if timeout is not None:
            self._kernel.at(self._kernel.now + timeout, self._time_out, waiter)
        try:
            message: VirtualMessage | None = self._wait_on(waiter.frm, waiter)
        except BaseException:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            raise
        return message

    def _wait_on(self, rank: int, *why: Any) -> Any:
        """Wait, and be woken if `rank` leaves or is lost before."""
        watchers = self._world.watchers[rank]
        watchers[self] = watchers.get(self, 0) + 1
        try:
            return self._kernel.wait(*why)
        finally:
            watchers[self] -= 1
            if not watchers[self]:
                del watchers[self]

    def _time_out(self, waiter: VirtualReceive) -> None:
        if waiter in self._waiters:
            self._waiters.remove(waiter)
            self._kernel.wake(waiter.activity)

    def deliver(self, message: VirtualMessage) -> None:
        """A message has arrived: hand it to the activity that waits for it, or queue it."""
        for waiter in self._waiters:
            if waiter.wants(message):
                self._waiters.remove(waiter)
                self._kernel.wake(waiter.activity, message)
                return
        self._queue.add(message)

    def redeliver(self, message: VirtualMessage) -> None:
        """The contents of a message were replaced: if it is queued, an activity may be waiting for its new tag."""
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

    def _raise_loss(self, frm: int) -> None:
        me, lost = self._kernel.current, self._world.lost
        if frm == ANY and me.losses_raised < len(lost):
            me.losses_raised += 1
            raise PeerLost(*lost[me.losses_raised - 1])
        if frm != ANY and (why := self._world.why_gone(frm)):
            raise PeerLost(frm, why)

    def notice(self, rank: int, why: str, lost: bool) -> None:
        """Another rank is gone: wake the activities that wait for its messages or its credit."""
        for waiter in list(self._waiters):
            if waiter.frm == rank or (lost and waiter.frm == ANY):
                if waiter.frm == ANY:
                    waiter.activity.losses_raised += 1
                self._waiters.remove(waiter)
                self._kernel.wake(waiter.activity, PeerLost(rank, why))
        for (to, _), channel in self._channels.items():
            while to == rank and channel.blocked:
                self._kernel.wake(channel.blocked.popleft())

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

    def spawn(self, activity: Callable[[], None], *, daemon: bool = False) -> VirtualActivity:
        name = f"{self.role} {self.rank} ({getattr(activity, '__name__', 'activity')})"
        return self._start(activity, name, daemon)

    def _start(self, run: Callable[[], None], name: str, daemon: bool = False) -> VirtualActivity:
        activity = self._kernel.spawn(run, name, self.rank, daemon)
        self.activities.append(activity)
        return activity

    def begin(self, program: Callable[[], None]) -> None:
        """Start the rank's main program."""
        self._start(program, f"{self.role} {self.rank}")

    def charge_compute(self, seconds: float) -> None:
        if self._turns is None or self.role != "worker":
            self._charge(seconds)
        elif self._may_charge(seconds):
            self._kernel.sleep_until(next(self._turns))

    def charge_copy(self, nbytes: int) -> None:
        self._charge(nbytes / REFERENCE_BYTES)

    def _may_charge(self, seconds: float) -> bool:
        """Always true; raises inside a backward pass, or if `seconds` is negative."""
        if inside_backward():
            raise MayNotWait(f"rank {self.rank} may not charge time inside a backward pass")
        if not seconds >= 0:  # a call less in every charge
            refuse_unless(False, "seconds to charge", seconds, ">= 0")
        return True

    def _charge(self, seconds: float) -> None:
        if self._may_charge(seconds) and self._turns is None and (seconds or self._deferred):
            if self._noise is not None:
                seconds *= math.exp(self._world.cluster.jitter * self._noise.gauss(0, 1))
            seconds, self._deferred = seconds + self._deferred, 0.0
            self._cores.charge(seconds / self.speed)

    def _charge_link(self, other: int, nbytes: int) -> None:
        """Charge the CPU time of moving bytes between hosts; inside a backward pass it is added to the next charge."""
        cost = nbytes * self._cpu_per_byte
        if cost and self.hosts[other] != self.host:
            if inside_backward():
                self._deferred += cost
            else:
                began = self._kernel.now
                self._charge(cost)
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

    def fail_as_lost(self, why: str) -> NoReturn:
        self._kernel.at(self._kernel.now, lambda _: self._world.lose(self.rank, why))
        self._kernel.wait("its end")
        raise AssertionError("a lost rank continues")

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
        return ClosedFormCollective(self._world, self, group)
