"""The port among real processes: threads for activities, sockets for order, shared memory for tensors of one host."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor

from manyhands.core.errors import ChangedInFlight, ManyhandsError, MayNotWait, PeerLost, refuse_unless
from manyhands.core.lending import Seal, inside_backward
from manyhands.core.protocols import ANY, Collective, Meta, Tag, made
from manyhands.runtime import wire
from manyhands.runtime.activity import Ended, RealActivity, later
from manyhands.runtime.freight import Freight, Load, plain
from manyhands.runtime.lanes import Debts, Lanes, Loan
from manyhands.runtime.links import Link, Reader, Writer
from manyhands.runtime.mailbox import Doing, Mailbox, RealMessage
from manyhands.runtime.member import Member
from manyhands.runtime.memory import HostLocks, Memory
from manyhands.runtime.native import Native
from manyhands.runtime.seat import Seat
from manyhands.runtime.wire import Acks, Head

LAST_WORDS = 0.5
"""Seconds in which the socket of a lost rank must have said all that it still had."""
VERDICT = 3.0
"""Seconds until a closed socket is a loss, if nobody who watches says anything."""


class RealTransport:
    """One rank among processes. It is made by `join.connect`."""

    plays = False

    def __init__(self, seat: Seat) -> None:
        self.rank, self.size, self.host = seat.rank, seat.size, seat.host
        self.roles: Sequence[str] = seat.roles
        self.hosts: Sequence[int] = seat.hosts
        self.role = seat.roles[seat.rank]
        self.late: Collection[int] = seat.late
        self.bytes_sent = 0
        self.seat = seat
        self.member = Member(seat, self._hear_of_loss, self._stop)
        self.memory = Memory(self.member.memory, seat.rank)
        self.reader, self._writer = Reader(), Writer()
        self._links: dict[int, Link] = {}
        self._mailbox = Mailbox(seat.rank)
        self._lanes = Lanes(seat.rank, self._mailbox.check)
        self._debts = Debts(at_once=seat.checks_lending)
        self._freight = Freight(seat, self.memory)
        self._locks = HostLocks(self.member.memory, self.note_wait)
        self._here = threading.local()
        self._main = self._here.doing = Doing()
        self._working: list[threading.Thread] = []
        self._threads = [self.member.thread, self.reader.thread, self._writer.thread]
        self._closing: dict[int, str] = {}
        self._has_left = self._has_failed = False
        self._last_word = threading.Lock()
        self.native_groups: dict[str, object] = {}
        self._began = time.monotonic()

    # -- joining ----------------------------------------------------------------------------------

    def attach(self, peer: int, sock: object) -> None:
        """A socket to a peer is ready, on both sides."""
        link = self._links[peer] = Link(peer, sock, self, self._writer)  # type: ignore[arg-type]
        self._mailbox.come(peer)
        self._lanes.reopen(peer)
        self.reader.watch(link, partial(self._read, link))

    def miss(self, peer: int, why: str) -> None:
        """A rank is not there, which is no loss."""
        self._mailbox.gone[peer] = why
        self._lanes.close(peer)

    def _read(self, link: Link) -> bool:
        """A rank that has gone deaf would leave the others waiting: better that it ends."""
        try:
            return link.read()
        except Exception as error:
            self.fail(error)
            return False

    def begin(self, at: float) -> None:
        """Everyone is here, and the clock has started; it is one for all ranks of a machine."""
        self._began = at

    # -- messages ---------------------------------------------------------------------------------

    def send(self, to: int, tag: Tag, meta: Meta = (), tensors: Sequence[Tensor] = (), *, latest: bool = False) -> None:
        began = time.monotonic()
        self._send(to, tag, meta, tensors, latest)
        self._doing().sending += time.monotonic() - began

    def _send(self, to: int, tag: Tag, meta: Meta, tensors: Sequence[Tensor], latest: bool) -> None:
        serial = self._lanes.open(to, tag, latest=latest)
        if serial is None:
            return
        lent = [plain(x) for x in tensors]
        seals = tuple(Seal(x) for x in tensors) if self.seat.checks_lending else ()
        if to == self.rank:
            self._lanes.lend(to, serial, Loan(tag, None, seals))
            message = RealMessage(to, tag, serial, meta, self._release_own, tensors=tuple(lent))
            self._deliver(message, latest)
            return
        self.bytes_sent += sum([x.nbytes for x in lent])
        load = self._freight.load(to, tag.name, lent) if lent else Load()
        self._lanes.lend(to, serial, Loan(tag, load.buffer, seals))
        head = Head(tag.name, tag.key, serial, tag.credit, latest, meta, load.pieces, self._debts.take(to))
        self._links[to].send([wire.pack(head), *load.body])

    def recv(self, *tags: Tag, frm: int = ANY, timeout: float | None = None) -> RealMessage | None:
        if inside_backward():
            raise MayNotWait(f"rank {self.rank} may not receive inside a backward pass")
        message = self._mailbox.receive(tags, frm, timeout, self._doing())
        if message is not None:
            if message.pieces:
                message.tensors = self._unloaded(message)
            if not message.tensors:
                message.release()
        return message

    def _unloaded(self, message: RealMessage) -> tuple[Tensor, ...]:
        try:
            return self._freight.unload(message)
        except ManyhandsError as error:
            self.ended(message.frm, f"it sent garbage: {error}")
            raise PeerLost(message.frm, f"it sent garbage: {error}") from None

    def _doing(self) -> Doing:
        doing: Doing = getattr(self._here, "doing", self._main)
        return doing

    def _deliver(self, message: RealMessage, latest: bool) -> None:
        if not latest:
            self._mailbox.deliver(message)
        elif old := self._mailbox.replace(message):
            old.release()

    def _release(self, message: RealMessage) -> None:
        if message.body is not None:
            self._freight.landings.give_back((message.frm, message.name), message.body)
        acks = self._debts.released(message.frm, message.name, message.serial, message.credit)
        if acks:
            self._links[message.frm].send([wire.pack_acks(acks)])

    def _release_own(self, message: RealMessage) -> None:
        self.came_back(self.rank, ((message.name, message.serial),))

    # -- what links bring (the reader's thread) ---------------------------------------------------

    def land(self, peer: int, head: Head, nbytes: int) -> Tensor:
        return self._freight.landings.take((peer, head.name), nbytes)

    def arrived(self, peer: int, head: Head, body: Tensor | None) -> None:
        acks = self._debts.arrived(peer, head.name, head.credit)
        if acks:
            self._links[peer].send([wire.pack_acks(acks)])
        tag = made(head.name, head.key, head.credit)
        message = RealMessage(peer, tag, head.serial, head.meta, self._release, pieces=head.pieces, body=body)
        self._deliver(message, head.latest)

    def came_back(self, peer: int, acks: Acks) -> None:
        for loan in self._lanes.lent(peer, acks):
            if any(seal.broken() for seal in loan.seals):
                self.fail(ChangedInFlight(self.rank, loan.tag))
            if loan.buffer is not None:
                self._freight.outgoing.give_back((peer, loan.tag.name), loan.buffer)
        self._lanes.come_back(peer, acks)

    def left(self, peer: int) -> None:
        self._lanes.close(peer)
        self._mailbox.goodbye(peer, "left")

    def ended(self, peer: int, why: str) -> None:
        """A socket is closed: with a loss already announced that was its last word, otherwise it will be."""
        self._links[peer].stop_sending()
        announced = self._closing.setdefault(peer, "")
        if announced:
            self._lose(peer, announced)
        elif peer not in self._mailbox.gone:
            later(VERDICT if "garbage" not in why else 0.0, lambda: self._lose(peer, why))

    # -- losses -----------------------------------------------------------------------------------

    def _hear_of_loss(self, rank: int, why: str) -> None:
        """A rank is lost, and fenced. What it had sent is still delivered, so its socket has the last word."""
        closed = rank in self._closing or rank not in self._links
        self._closing[rank] = why
        if closed:
            self._lose(rank, why)
        else:
            self._links[rank].stop_sending()
            later(LAST_WORDS, lambda: self._lose(rank, why))

    def _lose(self, rank: int, why: str) -> None:
        self._mailbox.goodbye(rank, why)
        self._lanes.close(rank)

    def _stop(self, error: BaseException) -> None:
        """Somebody has ended the run."""
        self._mailbox.fail(error)
        self._lanes.wake()

    def fail(self, error: BaseException) -> None:
        """End the run for all: this rank cannot go on. Whoever leaves or fails meanwhile waits until this is told."""
        with self._last_word:
            if not self._has_left and not self._has_failed:
                self._has_failed = True
                self.member.failed(error)
            self._stop(error)

    def check(self) -> None:
        """Raise what has ended this run."""
        self._mailbox.check()

    @property
    def gone(self) -> Mapping[int, str]:
        """Why a rank is no longer there."""
        return self._mailbox.gone

    @property
    def lost(self) -> Sequence[tuple[int, str]]:
        """The ranks that are lost, and why."""
        return self._mailbox.lost

    # -- memory, activities, time -----------------------------------------------------------------

    def slot(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self.memory.slot(numel, dtype)

    def shared(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        return self.memory.shared(name, numel, dtype)

    def lock(self, name: str) -> AbstractContextManager[None]:
        return self._locks.named(name)

    def note_wait(self, seconds: float) -> None:
        """The current activity has waited for others where no message was awaited."""
        self._doing().waited += seconds

    def spawn(self, activity: Callable[[], None], *, daemon: bool = False) -> RealActivity:
        def run() -> None:
            self._here.doing = Doing()
            try:
                activity()
            except Ended:
                pass
            except BaseException as error:
                self._stop(error)

        thread = threading.Thread(target=run, name=getattr(activity, "__name__", "activity"), daemon=True)
        thread.start()
        self._threads.append(thread)
        if not daemon:
            self._working.append(thread)
        return RealActivity(thread)

    def spend(self, seconds: float, *, moving: bool = False) -> None:
        if inside_backward():
            raise MayNotWait(f"rank {self.rank} may not spend time inside a backward pass")
        refuse_unless(seconds >= 0, "seconds to spend", seconds, ">= 0")

    def flush(self) -> None:
        for link in list(self._links.values()):
            link.flush()

    def leave(self) -> None:
        if self._has_left:
            return
        for thread in self._working:
            thread.join()
        self._mailbox.check()
        self.flush()
        if self.seat.checks_lending:
            self._lanes.wait_until_back(1.0)
        with self._last_word:
            self._mailbox.check()
            self._has_left = True
        for link in list(self._links.values()):
            link.send([wire.pack_leave()])
        self.flush()
        self.member.left()
        self._stop(Ended())

    def close(self) -> None:
        """End all threads: one that is at work while Python takes itself down would take the process with it."""
        ends = time.monotonic() + LAST_WORDS
        self._stop(Ended())
        self.reader.stop()
        self._writer.stop()
        self.member.hang_up()
        for thread in self._threads:
            thread.join(max(0.0, ends - time.monotonic()))

    def now(self) -> float:
        return time.monotonic() - self._began

    def waited(self) -> float:
        return self._main.waited

    def sending(self) -> float:
        return self._main.sending

    def peers(self, role: str | None = None) -> Sequence[int]:
        gone = self._mailbox.gone
        return [
            rank
            for rank in range(self.size)
            if rank != self.rank and rank not in gone and role in (None, self.roles[rank])
        ]

    def collective(self, group: Sequence[int]) -> Collective:
        if self.rank not in group:
            raise ManyhandsError(f"rank {self.rank} is not in the group {list(group)}")
        return Native(self, group)
