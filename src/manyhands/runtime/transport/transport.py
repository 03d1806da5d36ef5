"""The transport of real processes: threads run activities, sockets keep the order, shared memory holds the tensors
that ranks of one host exchange."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import NoReturn

import torch
from torch import Tensor

from manyhands.core.errors import ChangedInFlight, ManyhandsError, MayNotWait, PeerLost, refuse_unless
from manyhands.core.port import ANY, Collective, Meta, Tag, inside_backward, tag_from_wire
from manyhands.core.send_guard import SendGuard
from manyhands.runtime.membership.control_client import ControlClient
from manyhands.runtime.membership.event_loop import EventLoop
from manyhands.runtime.rank_spec import RankSpec
from manyhands.runtime.transport import wire
from manyhands.runtime.transport.activity import Ended, RealActivity, later
from manyhands.runtime.transport.flow_control import Channels, InFlight, PendingAcks
from manyhands.runtime.transport.links import Link
from manyhands.runtime.transport.mailbox import ActivityTimes, RealMessage, ThreadedMailbox
from manyhands.runtime.transport.resources import Resources
from manyhands.runtime.transport.shared_memory import HostLocks, Memory
from manyhands.runtime.transport.tensor_transfer import OutgoingTensors, TensorTransfer, plain
from manyhands.runtime.transport.torch_collectives import TorchCollective
from manyhands.runtime.transport.wire import Acks, Head

DRAIN = 0.5
"""Seconds in which the socket of a lost rank must have delivered everything that the rank had sent."""
VERDICT = 3.0
"""Seconds until a closed socket counts as a loss, unless the watcher reports how the rank ended."""


class RealTransport:
    """One rank of a job of processes. `launch.join.connect` makes it."""

    is_simulated = False

    def __init__(self, spec: RankSpec) -> None:
        self.rank, self.size, self.host = spec.rank, spec.size, spec.host
        self.roles: Sequence[str] = spec.roles
        self.hosts: Sequence[int] = spec.hosts
        self.role = spec.roles[spec.rank]
        self.pending_ranks: Collection[int] = spec.pending_ranks
        self.bytes_sent = 0
        self.spec = spec
        self.control = ControlClient(spec, self._on_loss, self._stop)
        self.memory = Memory(self.control.memory, spec.rank)
        self.reader, self._writer = EventLoop(), EventLoop()
        self._links: dict[int, Link] = {}
        self._mailbox = ThreadedMailbox(spec.rank)
        self._channels = Channels(spec.rank, self._mailbox.check)
        self._pending_acks = PendingAcks(at_once=spec.checks_lending)
        self._transfer = TensorTransfer(spec, self.memory)
        self._locks = HostLocks(self.control.memory, self.note_wait)
        self._local = threading.local()
        self._main = self._local.activity = ActivityTimes()
        self._working: list[threading.Thread] = []
        reader, writer = self.reader.start("manyhands reader"), self._writer.start("manyhands writer")
        self.resources = Resources(self.control.thread, reader, writer)
        self.resources.closes(self._writer.close, self.reader.close, self._locks.close, self.control.close)
        self._closing: dict[int, str] = {}
        """Why a rank is lost, by rank, while its socket is drained; empty if only its socket has closed so far."""
        self.has_left = self._has_failed = False
        self._ending = threading.Lock()
        self.native_groups: dict[str, object] = {}
        self._began = time.monotonic()

    # -- joining ----------------------------------------------------------------------------------

    def attach(self, peer: int, sock: socket.socket) -> None:
        """Exchange messages with this peer over an authenticated socket."""
        link = self._links[peer] = Link(peer, sock, self, self._writer)
        self.resources.closes(link.close)
        self._mailbox.joined(peer)
        self._channels.reopen(peer)
        self.reader.post(lambda: self.reader.on_readable(link, partial(self._read, link)))

    def mark_absent(self, peer: int, why: str) -> None:
        """Treat a rank as gone without reporting a loss."""
        self._mailbox.gone[peer] = why
        self._channels.close(peer)

    def _read(self, link: Link) -> None:
        """A rank that can no longer receive would make the others wait for ever, so an error here ends the run."""
        try:
            more = link.read()
        except Exception as error:
            self.fail(error)
            more = False
        if not more:
            self.reader.remove(link)

    def begin(self, at: float) -> None:
        """All ranks are connected; the clock starts at `at`, the same instant for all ranks of a machine."""
        self._began = at

    # -- messages ---------------------------------------------------------------------------------

    def send(self, to: int, tag: Tag, meta: Meta = (), tensors: Sequence[Tensor] = (), *, latest: bool = False) -> None:
        began = time.monotonic()
        self._send(to, tag, meta, tensors, latest)
        self._times().sending += time.monotonic() - began

    def _send(self, to: int, tag: Tag, meta: Meta, tensors: Sequence[Tensor], latest: bool) -> None:
        serial = self._channels.open(to, tag, latest=latest)
        if serial is None:
            return
        plain_tensors = [plain(x) for x in tensors]
        guards = tuple(SendGuard(x) for x in tensors) if self.spec.checks_lending else ()
        if to == self.rank:
            self._channels.sent(to, serial, InFlight(tag, None, guards))
            release = partial(self.acknowledged, to, ((tag.name, serial),))
            message = RealMessage(to, tag, serial, meta, lambda _: release(), tensors=tuple(plain_tensors))
            self._deliver(message, latest)
            return
        self.bytes_sent += sum([x.nbytes for x in plain_tensors])
        outgoing = self._transfer.pack(to, tag.name, plain_tensors) if plain_tensors else OutgoingTensors()
        self._channels.sent(to, serial, InFlight(tag, outgoing.buffer, guards))
        acks = self._pending_acks.take(to)
        head = Head(tag.name, tag.key, serial, tag.credit, latest, meta, outgoing.headers, acks)
        self._links[to].send([wire.pack(head), *outgoing.body])

    def recv(self, *tags: Tag, frm: int = ANY, timeout: float | None = None) -> RealMessage | None:
        if inside_backward():
            raise MayNotWait(f"rank {self.rank} may not receive inside a backward pass")
        message = self._mailbox.receive(tags, frm, timeout, self._times())
        if message is not None:
            if message.headers:
                message.tensors = self._unpack(message)
            if not message.tensors:
                message.release()
        return message

    def _unpack(self, message: RealMessage) -> tuple[Tensor, ...]:
        try:
            return self._transfer.unpack(message)
        except ManyhandsError as error:
            self.link_closed(message.frm, f"it sent garbage: {error}")
            raise PeerLost(message.frm, f"it sent garbage: {error}") from None

    def _times(self) -> ActivityTimes:
        return getattr(self._local, "activity", self._main)

    def _deliver(self, message: RealMessage, latest: bool) -> None:
        if not latest:
            self._mailbox.deliver(message)
        elif old := self._mailbox.replace(message):
            old.release()

    def _release(self, message: RealMessage) -> None:
        if message.body is not None:
            self._transfer.incoming.give_back((message.frm, message.name), message.body)
        acks = self._pending_acks.released(message.frm, message.name, message.serial, message.credit)
        if acks:
            self._links[message.frm].send([wire.pack_acks(acks)])

    # -- what arrives over links (in the reader's thread) -----------------------------------------

    def receive_buffer(self, peer: int, head: Head, nbytes: int) -> Tensor:
        return self._transfer.incoming.take((peer, head.name), nbytes)

    def received(self, peer: int, head: Head, body: Tensor | None) -> None:
        acks = self._pending_acks.received(peer, head.name, head.credit)
        if acks:
            self._links[peer].send([wire.pack_acks(acks)])
        tag = tag_from_wire(head.name, head.key, head.credit)
        message = RealMessage(peer, tag, head.serial, head.meta, self._release, headers=head.tensors, body=body)
        self._deliver(message, head.latest)

    def acknowledged(self, peer: int, acks: Acks) -> None:
        for sent in self._channels.in_flight(peer, acks):
            if any(guard.broken() for guard in sent.guards):
                self.fail(ChangedInFlight(self.rank, sent.tag))
            if sent.buffer is not None:
                self._transfer.outgoing.give_back((peer, sent.tag.name), sent.buffer)
        self._channels.acknowledge(peer, acks)

    def left(self, peer: int) -> None:
        self._channels.close(peer)
        self._mailbox.mark_gone(peer, "left")

    def link_closed(self, peer: int, why: str) -> None:
        """If the watcher has reported the loss, its socket is drained now; otherwise wait for that report."""
        self._links[peer].stop_sending()
        reported = self._closing.setdefault(peer, "")
        if reported:
            self._lose(peer, reported)
        elif peer not in self._mailbox.gone and not self.has_left:
            later(VERDICT if "garbage" not in why else 0.0, lambda: self._lose(peer, why))

    # -- losses -----------------------------------------------------------------------------------

    def _on_loss(self, rank: int, why: str) -> None:
        """A rank is lost and fenced. What it had sent is still delivered: it is gone once its socket is drained."""
        closed = rank in self._closing or rank not in self._links
        self._closing[rank] = why
        if closed:
            self._lose(rank, why)
        else:
            self._links[rank].stop_sending()
            later(DRAIN, lambda: self._lose(rank, why))

    def _lose(self, rank: int, why: str) -> None:
        self._mailbox.mark_gone(rank, why)
        self._channels.close(rank)

    def _stop(self, error: BaseException) -> None:
        """Raise `error` in every activity that waits, now or later."""
        self._mailbox.fail(error)
        self._channels.wake()

    def fail(self, error: BaseException) -> None:
        """End the run of all ranks with `error`. The lock makes `leave` wait until the watcher has been informed."""
        with self._ending:
            if not self.has_left and not self._has_failed:
                self._has_failed = True
                self.control.failed(error)
            self._stop(error)

    def check(self) -> None:
        """Raise the error that has ended this run, if there is one."""
        self._mailbox.check()

    @property
    def gone(self) -> Mapping[int, str]:
        """Why a rank is absent, for every absent rank."""
        return self._mailbox.gone

    @property
    def lost(self) -> Sequence[tuple[int, str]]:
        """The lost ranks and the reasons, in the order of their loss."""
        return self._mailbox.lost

    # -- memory, activities, time -----------------------------------------------------------------

    def slot(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self.memory.slot(numel, dtype)

    def shared(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        return self.memory.shared(name, numel, dtype)

    def lock(self, name: str) -> AbstractContextManager[None]:
        return self._locks.named(name)

    def note_wait(self, seconds: float) -> None:
        """Count a wait of the current activity that was not for a message, such as for a lock."""
        self._times().waited += seconds

    def spawn(self, activity: Callable[[], None], *, daemon: bool = False) -> RealActivity:
        def run() -> None:
            self._local.activity = ActivityTimes()
            try:
                activity()
            except Ended:
                pass
            except BaseException as error:
                self._stop(error)

        started = RealActivity(run, getattr(activity, "__name__", "activity"))
        self.resources.threads.append(started.thread)
        if not daemon:
            self._working.append(started.thread)
        return started

    def charge_compute(self, seconds: float) -> None:
        if inside_backward():
            raise MayNotWait(f"rank {self.rank} may not charge time inside a backward pass")
        refuse_unless(seconds >= 0, "seconds to charge", seconds, ">= 0")

    def charge_copy(self, nbytes: int) -> None:
        self.charge_compute(nbytes)

    def flush(self) -> None:
        for link in list(self._links.values()):
            link.flush()

    def leave(self) -> None:
        if self.has_left:
            return
        for thread in self._working:
            thread.join()
        self._mailbox.check()
        self.flush()
        if self.spec.checks_lending:
            self._channels.wait_until_acknowledged(1.0)
        with self._ending:
            self._mailbox.check()
            self.has_left = True
        for link in list(self._links.values()):
            link.send([wire.pack_leave()])
        self.flush()
        self.control.left()
        self._stop(Ended())

    def fail_as_lost(self, why: str) -> NoReturn:
        with self._ending:  # and no report of an error after this one
            self.control.end_as_lost(why)

    def close(self) -> None:
        """End all threads: one that still runs while the interpreter shuts down would crash the process."""
        self._stop(Ended())
        self.reader.stop()
        self._writer.stop()
        self.control.shut_down()
        self.resources.close(DRAIN)

    def now(self) -> float:
        return time.monotonic() - self._began

    def waited(self) -> float:
        return self._main.waited

    def sending(self) -> float:
        return self._main.sending

    def peers(self, role: str | None = None) -> Sequence[int]:
        others = [rank for rank in range(self.size) if rank != self.rank and rank not in self._mailbox.gone]
        return others if role is None else [rank for rank in others if self.roles[rank] == role]

    def collective(self, group: Sequence[int]) -> Collective:
        return TorchCollective(self, group)
