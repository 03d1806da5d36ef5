"""Links: one socket to every other rank, one thread that reads them all and one that writes.

A frame is written by whoever sends it, if it is small and nothing waits before it; everything else goes through the
queue of its link, in order, and the writer's hands. Bodies land where the receiver says, in buffers that are used
again, never in fresh memory.
"""

from __future__ import annotations

import fcntl
import logging
import os
import selectors
import socket
import struct
import termios
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Protocol

from torch import Tensor

from manyhands.runtime import wire
from manyhands.runtime.wire import Acks, Garbled, Head

log = logging.getLogger("manyhands")

DIRECT = 64 * 1024
"""Bytes up to which the sender's own thread writes a frame."""
AT_ONCE = 64
"""Pieces of memory in one call of the kernel."""
STAGING = 64 * 1024
TURNS = 32
"""Reads from one link before the others have theirs."""


class Sink(Protocol):
    """Whoever gets what comes in; called by the reader's thread."""

    def land(self, peer: int, head: Head, nbytes: int) -> Tensor:
        """Memory for the body of a message."""

    def arrived(self, peer: int, head: Head, body: Tensor | None) -> None:
        """A whole message is here."""

    def came_back(self, peer: int, acks: Acks) -> None:
        """Messages were released."""

    def left(self, peer: int) -> None:
        """Nothing more will come from this peer: it said so."""

    def ended(self, peer: int, why: str) -> None:
        """Nothing more will come from this peer: its socket is closed, or it sent garbage."""


class Link:
    """The connection to one peer."""

    def __init__(self, peer: int, sock: socket.socket, sink: Sink, writer: Writer) -> None:
        self.peer = peer
        self.sock = sock
        sock.setblocking(False)
        self._far = sock.family != socket.AF_UNIX
        if self._far:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sink = sink
        self._writer = writer
        self._queue: deque[memoryview] = deque()
        self._open = True
        self._sending = threading.Condition(threading.Lock())
        self._staging = memoryview(bytearray(STAGING))
        self._filled = 0
        self._incoming: tuple[Head, Tensor, memoryview] | None = None

    def fileno(self) -> int:
        return self.sock.fileno()

    # -- sending ----------------------------------------------------------------------------------

    def send(self, pieces: Iterable[bytes | memoryview]) -> None:
        """Send a frame after all that were sent before; to a closed link nothing goes."""
        frame = [memoryview(piece) for piece in pieces]
        with self._sending:
            if not self._open:
                return
            waits = bool(self._queue)
            self._queue.extend(frame)
            if not waits and sum(piece.nbytes for piece in frame) <= DIRECT:
                self._push()
            if not self._queue or waits:
                return
        self._writer.wake(self)

    def push(self) -> bool:
        """Write as much as the socket takes; says whether nothing is left."""
        with self._sending:
            return self._push()

    def _push(self) -> bool:
        queue = self._queue
        try:
            while queue:
                sent = self.sock.sendmsg([queue[place] for place in range(min(len(queue), AT_ONCE))])
                while queue and sent >= queue[0].nbytes:
                    sent -= queue.popleft().nbytes
                if sent:
                    queue[0] = queue[0][sent:]
        except BlockingIOError:
            return False
        except OSError:
            queue.clear()
            self._shut()  # what is lost may not be missed: now the reader will notice
        self._sending.notify_all()
        return True

    def flush(self) -> None:
        """Wait until the other side's kernel has everything."""
        with self._sending:
            while self._queue and self._open:
                self._sending.wait()
        while self._far and self._open and _unacknowledged(self.sock):
            time.sleep(2e-4)

    def stop_sending(self) -> None:
        """Drop what was not sent and free whoever waits for it."""
        with self._sending:
            self._open = False
            self._queue.clear()
            self._sending.notify_all()
            with suppress(OSError):
                self.sock.shutdown(socket.SHUT_WR)

    # -- receiving, by the reader's thread only ---------------------------------------------------

    def read(self) -> bool:
        """Take in what is there; says whether more may come."""
        try:
            for _ in range(TURNS):
                if self._incoming is not None:
                    head, body, rest = self._incoming
                    got = self.sock.recv_into(rest)
                    self._take_body(head, body, rest[got:])
                else:
                    got = self.sock.recv_into(self._staging[self._filled :])
                    self._filled += got
                    self._take_frames()
                if not got:
                    return self._end("its connection was closed")
        except BlockingIOError:
            return True
        except Garbled as error:
            log.warning("the link to rank %d is closed: it sent garbage: %s", self.peer, error)
            return self._end(f"it sent garbage: {error}")
        except OSError as error:
            return self._end(f"its connection broke: {error.strerror or error}")
        return True

    def _end(self, why: str) -> bool:
        self._sink.ended(self.peer, why)
        self._shut()
        return False

    def _shut(self) -> None:
        """Both sides hear of it; what has come in can still be read."""
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def _take_frames(self) -> None:
        start, have = 0, self._filled
        while have - start >= wire.PREFIX.size:
            kind, header, body = wire.unpack_prefix(self._staging[start:have])
            text = start + wire.PREFIX.size
            if have - text < header:
                self._make_room(start, wire.PREFIX.size + header)
                return
            start = text + header
            self._take_frame(kind, self._staging[text:start], body)
            if self._incoming is not None:
                head, memory, rest = self._incoming
                got = min(len(rest), have - start)
                rest[:got] = self._staging[start : start + got]
                start += got
                self._take_body(head, memory, rest[got:])
        self._make_room(start, 0)

    def _take_frame(self, kind: int, text: memoryview, body: int) -> None:
        if kind == wire.RELEASE:
            self._sink.came_back(self.peer, wire.unpack_acks(text))
        elif kind == wire.LEAVE:
            self._sink.left(self.peer)
        else:
            head = wire.unpack(text, body)
            if self._far and any([piece.region for piece in head.pieces]):
                raise Garbled("it speaks of memory of another host")
            if head.acks:
                self._sink.came_back(self.peer, head.acks)
            if body:
                memory = self._room_for(head, body)
                self._incoming = head, memory, memoryview(memory.numpy())[:body]  # type: ignore[arg-type]
            else:
                self._sink.arrived(self.peer, head, None)

    def _room_for(self, head: Head, nbytes: int) -> Tensor:
        try:
            return self._sink.land(self.peer, head, nbytes)
        except (RuntimeError, MemoryError):  # as torch says it, and as Python does
            raise Garbled(f"it announces {nbytes} bytes, for which there is no memory") from None

    def _take_body(self, head: Head, body: Tensor, rest: memoryview) -> None:
        if rest:
            self._incoming = head, body, rest
        else:
            self._incoming = None
            self._sink.arrived(self.peer, head, body)

    def _make_room(self, start: int, need: int) -> None:
        """Move what is left to the front, into a larger memory if it must be."""
        rest = self._staging[start : self._filled]
        if need > len(self._staging):
            larger = memoryview(bytearray(need))
            larger[: len(rest)] = rest
            self._staging = larger
        elif start:
            self._staging[: len(rest)] = bytes(rest)
        self._filled = len(rest)


def _unacknowledged(sock: socket.socket) -> int:
    try:
        (count,) = struct.unpack("i", fcntl.ioctl(sock, termios.TIOCOUTQ, b"\0" * 4))
    except OSError:
        return 0
    return int(count)


class _Loop:
    """A thread around a selector, with a bell to wake it."""

    def __init__(self, name: str) -> None:
        self._selector = selectors.DefaultSelector()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._calls: deque[Callable[[], None]] = deque()
        self._running = True
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def stop(self) -> None:
        """End the thread, after what it is doing."""
        self._later(lambda: setattr(self, "_running", False))

    def _later(self, call: Callable[[], None]) -> None:
        self._calls.append(call)
        os.eventfd_write(self._bell, 1)

    def _run(self) -> None:
        while self._running:
            for key, _ in self._selector.select():
                if key.fd == self._bell:
                    os.eventfd_read(self._bell)
                    while self._calls:
                        self._calls.popleft()()
                else:
                    self._serve(key.fileobj, key.data)

    def _serve(self, what: object, call: Callable[[], bool]) -> None:
        if not call():
            self._selector.unregister(what)  # type: ignore[arg-type]


class Reader(_Loop):
    """Calls back when there is something to read, until told that there is no more."""

    def __init__(self) -> None:
        super().__init__("manyhands reader")

    def watch(self, what: Link | socket.socket, read: Callable[[], bool]) -> None:
        """Call `read` whenever something can be read, as long as it says True."""
        self._later(lambda: self._selector.register(what, selectors.EVENT_READ, read) and None)


class Writer(_Loop):
    """Writes what links could not write at once."""

    def __init__(self) -> None:
        super().__init__("manyhands writer")

    def wake(self, link: Link) -> None:
        """There is something in this link's queue."""
        self._later(lambda: self._begin(link))

    def _begin(self, link: Link) -> None:
        if not link.push() and link not in self._selector.get_map():
            self._selector.register(link, selectors.EVENT_WRITE, lambda: not link.push())
