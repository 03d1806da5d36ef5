"""Mailbox: what has come in for a rank, who waits for what, and who is gone."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from torch import Tensor

from manyhands.core.errors import ManyhandsError, PeerLost
from manyhands.core.protocols import ANY, Meta, Tag
from manyhands.runtime.wire import Piece


class RealMessage:
    """A message between processes. Its tensors lie in a landing buffer, or in memory of the sender's host."""

    __slots__ = ("_give_back", "body", "credit", "frm", "key", "meta", "name", "pieces", "serial", "tag", "tensors")

    def __init__(
        self,
        frm: int,
        tag: Tag,
        serial: int,
        meta: Meta,
        give_back: Callable[[RealMessage], None],
        *,
        pieces: Sequence[Piece] = (),
        body: Tensor | None = None,
        tensors: tuple[Tensor, ...] = (),
    ) -> None:
        self.frm = frm
        self.tag = tag
        self.name, self.key, self.credit, _ = tag
        self.serial = serial
        self.meta = meta
        self.pieces = pieces
        self.body = body
        self.tensors = tensors
        self._give_back: Callable[[RealMessage], None] | None = give_back

    def release(self) -> None:
        """Give the tensors and the credit back."""
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back(self)

    def keep(self) -> tuple[Tensor, ...]:
        """Copy, then release."""
        copies = tuple(x.clone() for x in self.tensors)
        self.release()
        return copies


class Doing:
    """What is known of one activity: how many losses it was told of, how long it has waited, and how long sent."""

    __slots__ = ("sending", "told", "waited")

    def __init__(self) -> None:
        self.told = 0
        self.waited = self.sending = 0.0


class Waiter:
    """Somebody who waits for a message; `bell` is locked until there is news."""

    __slots__ = ("bell", "doing", "error", "frm", "message", "tags")

    def __init__(self, tags: tuple[Tag, ...], frm: int, doing: Doing) -> None:
        self.tags = tags
        self.frm = frm
        self.doing = doing
        self.message: RealMessage | None = None
        self.error: BaseException | None = None
        self.bell = threading.Lock()
        self.bell.acquire()

    def wants(self, message: RealMessage) -> bool:
        return self.frm in (ANY, message.frm) and _matches(message, self.tags)

    def clashes(self, other: Waiter) -> bool:
        same_sender = self.frm == other.frm or ANY in (self.frm, other.frm)
        mine = {tag[:2] for tag in self.tags}
        return same_sender and not mine.isdisjoint(tag[:2] for tag in other.tags)


def _matches(message: RealMessage, tags: tuple[Tag, ...]) -> bool:
    return any(tag.key == message.key and tag.name == message.name for tag in tags)


class Mailbox:
    """One rank's incoming messages. Any thread may deliver, any may wait."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.gone: dict[int, str] = {}
        """Why a rank is not there."""
        self.lost: list[tuple[int, str]] = []
        self.error: BaseException | None = None
        self._busy = threading.Lock()
        self._queue: deque[RealMessage] = deque()
        self._waiters: list[Waiter] = []

    def check(self) -> None:
        """Raise what has ended this run."""
        if self.error is not None:
            raise self.error

    # -- waiting ----------------------------------------------------------------------------------

    def receive(self, tags: tuple[Tag, ...], frm: int, timeout: float | None, doing: Doing) -> RealMessage | None:
        """The first message that fits; None when the time is over."""
        with self._busy:
            self.check()
            message = self._take(tags, frm)
            if message is not None:
                return message
            self._tell_loss(frm, doing)
            if timeout is not None and timeout <= 0:
                return None
            waiter = self._enter(Waiter(tags, frm, doing))
        began = time.monotonic()
        try:
            waiter.bell.acquire(timeout=-1 if timeout is None else timeout)
        finally:
            with self._busy:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)
            doing.waited += time.monotonic() - began
        if waiter.error is not None:
            raise waiter.error
        return waiter.message

    def _enter(self, waiter: Waiter) -> Waiter:
        for other in self._waiters:
            if waiter.clashes(other):
                raise ManyhandsError(f"two activities of rank {self.rank} wait for {waiter.tags[0]} at once")
        self._waiters.append(waiter)
        return waiter

    def _take(self, tags: tuple[Tag, ...], frm: int) -> RealMessage | None:
        for place, message in enumerate(self._queue):
            if frm in (ANY, message.frm) and _matches(message, tags):
                del self._queue[place]
                return message
        return None

    def _tell_loss(self, frm: int, doing: Doing) -> None:
        if frm == ANY and doing.told < len(self.lost):
            doing.told += 1
            raise PeerLost(*self.lost[doing.told - 1])
        if frm in self.gone:
            raise PeerLost(frm, self.gone[frm])

    # -- news -------------------------------------------------------------------------------------

    def deliver(self, message: RealMessage) -> None:
        """A message has come in."""
        with self._busy:
            self._hand_over(message)

    def replace(self, message: RealMessage) -> RealMessage | None:
        """A message has come in that makes the last unread one of its lane superfluous; gives that one back."""
        with self._busy:
            for place in reversed(range(len(self._queue))):
                old = self._queue[place]
                if (old.frm, old.name) == (message.frm, message.name):
                    if not self._served(message):
                        self._queue[place] = message
                    else:
                        del self._queue[place]
                    return old
            self._hand_over(message)
            return None

    def _hand_over(self, message: RealMessage) -> None:
        if not self._served(message):
            self._queue.append(message)

    def _served(self, message: RealMessage) -> bool:
        for waiter in self._waiters:
            if waiter.wants(message):
                waiter.message = message
                self._wake(waiter)
                return True
        return False

    def _wake(self, waiter: Waiter) -> None:
        self._waiters.remove(waiter)
        waiter.bell.release()

    def come(self, rank: int) -> None:
        """A rank that was not there is here."""
        with self._busy:
            self.gone.pop(rank, None)

    def goodbye(self, rank: int, why: str) -> None:
        """A rank is gone: "left" after a clean exit, anything else is a loss."""
        with self._busy:
            if rank in self.gone or self.error is not None:
                return
            self.gone[rank] = why
            lost = why != "left"
            if lost:
                self.lost.append((rank, why))
            for waiter in list(self._waiters):
                if waiter.frm == rank or (lost and waiter.frm == ANY):
                    waiter.doing.told += waiter.frm == ANY
                    waiter.error = PeerLost(rank, why)
                    self._wake(waiter)

    def fail(self, error: BaseException) -> None:
        """The run is over: whoever waits, or comes to wait, gets this error. The first one stays."""
        with self._busy:
            self.error = self.error or error
            for waiter in list(self._waiters):
                waiter.error = self.error
                self._wake(waiter)
