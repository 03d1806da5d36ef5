"""The mailbox of a real rank: received messages, blocked receives, and the ranks that are gone."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from torch import Tensor

from manyhands.core.errors import ManyhandsError, PeerLost
from manyhands.core.port import ANY, Meta, Tag, matches, overlap
from manyhands.runtime.transport.wire import TensorHeader


class RealMessage:
    """A message between processes. Its tensors lie in a receive buffer or in shared memory of the host."""

    __slots__ = ("_give_back", "body", "credit", "frm", "headers", "key", "meta", "name", "serial", "tag", "tensors")

    def __init__(
        self,
        frm: int,
        tag: Tag,
        serial: int,
        meta: Meta,
        give_back: Callable[[RealMessage], None],
        *,
        headers: Sequence[TensorHeader] = (),
        body: Tensor | None = None,
        tensors: tuple[Tensor, ...] = (),
    ) -> None:
        self.frm = frm
        self.tag = tag
        self.name, self.key, self.credit, _ = tag
        self.serial = serial
        self.meta = meta
        self.headers = headers
        self.body = body
        self.tensors = tensors
        self._give_back: Callable[[RealMessage], None] | None = give_back

    def release(self) -> None:
        """Give the tensors and the credit back to the sender; a second call does nothing."""
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back(self)

    def keep(self) -> tuple[Tensor, ...]:
        """Copy the tensors, release the message, return the copies."""
        copies = tuple(x.clone() for x in self.tensors)
        self.release()
        return copies


class ActivityTimes:
    """Of one activity: how many losses were raised in it, and its seconds of waiting and of sending."""

    __slots__ = ("losses_raised", "sending", "waited")

    def __init__(self) -> None:
        self.losses_raised = 0
        self.waited = self.sending = 0.0


class BlockedReceive:
    """A receive that waits; `blocked` is locked until there is a message or an error."""

    __slots__ = ("activity", "blocked", "error", "frm", "message", "tags")

    def __init__(self, tags: tuple[Tag, ...], frm: int, activity: ActivityTimes) -> None:
        self.tags = tags
        self.frm = frm
        self.activity = activity
        self.message: RealMessage | None = None
        self.error: BaseException | None = None
        self.blocked = threading.Lock()
        self.blocked.acquire()

    def wants(self, message: RealMessage) -> bool:
        return self.frm in (ANY, message.frm) and matches(message.tag, self.tags)

    def clashes(self, other: BlockedReceive) -> bool:
        same_sender = self.frm == other.frm or ANY in (self.frm, other.frm)
        return same_sender and overlap(self.tags, other.tags)


class ThreadedMailbox:
    """One rank's incoming messages. Any thread may deliver, any may wait."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.gone: dict[int, str] = {}
        """Why a rank is absent, for every absent rank."""
        self.lost: list[tuple[int, str]] = []
        self.error: BaseException | None = None
        self._lock = threading.Lock()
        self._queue: deque[RealMessage] = deque()
        self._waiters: list[BlockedReceive] = []

    def check(self) -> None:
        """Raise the error that has ended this run, if there is one."""
        if self.error is not None:
            raise self.error

    # -- waiting ----------------------------------------------------------------------------------

    def receive(
        self, tags: tuple[Tag, ...], frm: int, timeout: float | None, activity: ActivityTimes
    ) -> RealMessage | None:
        """The first message that matches; None when `timeout` seconds have passed."""
        with self._lock:
            self.check()
            message = self._take(tags, frm)
            if message is not None:
                return message
            self._raise_loss(frm, activity)
            if timeout is not None and timeout <= 0:
                return None
            waiter = self._block(BlockedReceive(tags, frm, activity))
        began = time.monotonic()
        try:
            waiter.blocked.acquire(timeout=-1 if timeout is None else timeout)
        finally:
            with self._lock:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)
            activity.waited += time.monotonic() - began
        if waiter.error is not None:
            raise waiter.error
        return waiter.message

    def _block(self, waiter: BlockedReceive) -> BlockedReceive:
        for other in self._waiters:
            if waiter.clashes(other):
                raise ManyhandsError(f"two activities of rank {self.rank} wait for {waiter.tags[0]} at the same time")
        self._waiters.append(waiter)
        return waiter

    def _take(self, tags: tuple[Tag, ...], frm: int) -> RealMessage | None:
        for index, message in enumerate(self._queue):
            if frm in (ANY, message.frm) and matches(message.tag, tags):
                del self._queue[index]
                return message
        return None

    def _raise_loss(self, frm: int, activity: ActivityTimes) -> None:
        if frm == ANY and activity.losses_raised < len(self.lost):
            activity.losses_raised += 1
            raise PeerLost(*self.lost[activity.losses_raised - 1])
        if frm in self.gone:
            raise PeerLost(frm, self.gone[frm])

    # -- arrivals and losses ----------------------------------------------------------------------

    def deliver(self, message: RealMessage) -> None:
        """Hand a message to the receive that waits for it, or queue it."""
        with self._lock:
            if not self._hand_over(message):
                self._queue.append(message)

    def replace(self, message: RealMessage) -> RealMessage | None:
        """Deliver a message in place of the newest unread one of its channel, which is returned."""
        with self._lock:
            for index in reversed(range(len(self._queue))):
                old = self._queue[index]
                if (old.frm, old.name) == (message.frm, message.name):
                    if self._hand_over(message):
                        del self._queue[index]
                    else:
                        self._queue[index] = message
                    return old
            if not self._hand_over(message):
                self._queue.append(message)
            return None

    def _hand_over(self, message: RealMessage) -> bool:
        for waiter in self._waiters:
            if waiter.wants(message):
                waiter.message = message
                self._wake(waiter)
                return True
        return False

    def _wake(self, waiter: BlockedReceive) -> None:
        self._waiters.remove(waiter)
        waiter.blocked.release()

    def joined(self, rank: int) -> None:
        """A rank that was absent is present."""
        with self._lock:
            self.gone.pop(rank, None)

    def mark_gone(self, rank: int, why: str) -> None:
        """A rank is gone: "left" after a clean exit; any other reason is a loss and is raised in waiting receives."""
        with self._lock:
            if rank in self.gone or self.error is not None:
                return
            self.gone[rank] = why
            lost = why != "left"
            if lost:
                self.lost.append((rank, why))
            for waiter in list(self._waiters):
                if waiter.frm == rank or (lost and waiter.frm == ANY):
                    waiter.activity.losses_raised += waiter.frm == ANY
                    waiter.error = PeerLost(rank, why)
                    self._wake(waiter)

    def fail(self, error: BaseException) -> None:
        """The run is over: every receive raises this error, now and later. The first error counts."""
        with self._lock:
            self.error = self.error or error
            for waiter in list(self._waiters):
                waiter.error = self.error
                self._wake(waiter)
