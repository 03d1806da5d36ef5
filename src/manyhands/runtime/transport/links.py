"""Links: one socket to every other rank; one event loop reads them all, and one writes what does not fit at once.

A small frame is written by the sending thread itself if the link's send buffer is empty. All others pass through that
buffer, in order, and the writer's loop empties it. Bodies are received into reused buffers of the receiver's choice.
"""

from __future__ import annotations

import fcntl
import logging
import socket
import struct
import termios
import threading
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import Protocol

from torch import Tensor

from manyhands.runtime.membership.event_loop import EventLoop
from manyhands.runtime.transport import wire
from manyhands.runtime.transport.wire import Acks, Garbled, Head

log = logging.getLogger("manyhands")

DIRECT = 64 * 1024
"""Bytes up to which the sending thread writes a frame itself."""
MOST_BUFFERS = 64
"""Buffers in one call of `sendmsg`."""
STAGING = 64 * 1024
"""Bytes of the buffer that headers are received into."""
MOST_READS = 32
"""Reads from one link before the loop serves the others."""


class Sink(Protocol):
    """The receiver of what arrives over links; called in the reader's thread."""

    def receive_buffer(self, peer: int, head: Head, nbytes: int) -> Tensor:
        """Memory for the body of a message, at least `nbytes`."""

    def received(self, peer: int, head: Head, body: Tensor | None) -> None:
        """A message has been received completely."""

    def acknowledged(self, peer: int, acks: Acks) -> None:
        """The peer has released messages of ours."""

    def left(self, peer: int) -> None:
        """The peer has announced its clean exit: it sends nothing more."""

    def link_closed(self, peer: int, why: str) -> None:
        """The peer sends nothing more: its socket is closed, or it sent garbage."""


class Link:
    """The connection to one peer.

    Args:
        peer: its rank.
        sock: connected and authenticated.
        sink: takes what arrives.
        writer: the loop that writes what the sending thread could not write at once.
    """

    def __init__(self, peer: int, sock: socket.socket, sink: Sink, writer: EventLoop) -> None:
        self.peer = peer
        self.sock = sock
        sock.setblocking(False)
        self._far = sock.family != socket.AF_UNIX
        if self._far:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sink = sink
        self._writer = writer
        self._send_buffer: deque[memoryview] = deque()
        self._open = True
        self._sending = threading.Condition(threading.Lock())
        self._staging = memoryview(bytearray(STAGING))
        self._filled = 0
        self._incoming: tuple[Head, Tensor, memoryview] | None = None

    def fileno(self) -> int:
        return self.sock.fileno()

    # -- sending ----------------------------------------------------------------------------------

    def send(self, parts: Iterable[bytes | memoryview]) -> None:
        """Send a frame after all earlier ones; on a closed link it is dropped."""
        frame = [memoryview(part) for part in parts]
        with self._sending:
            if not self._open:
                return
            busy = bool(self._send_buffer)
            self._send_buffer.extend(frame)
            if not busy and sum(part.nbytes for part in frame) <= DIRECT:
                self._write()
            if not self._send_buffer or busy:
                return
        self._writer.post(self._continue_writing)

    def _continue_writing(self) -> None:
        """In the writer's thread, until the send buffer is empty."""
        with self._sending:
            done = self._write()
        if done:
            self._writer.remove(self)
        else:
            self._writer.on_writable(self, self._continue_writing)

    def _write(self) -> bool:
        """Write as much as the socket takes; whether the send buffer is empty now. The lock is held."""
        buffer = self._send_buffer
        try:
            while buffer:
                sent = self.sock.sendmsg([buffer[index] for index in range(min(len(buffer), MOST_BUFFERS))])
                while buffer and sent >= buffer[0].nbytes:
                    sent -= buffer.popleft().nbytes
                if sent:
                    buffer[0] = buffer[0][sent:]
        except BlockingIOError:
            return False
        except OSError:
            buffer.clear()
            self._shut_down()  # frames are lost: the reader finds the socket closed and reports it
        self._sending.notify_all()
        return True

    def flush(self) -> None:
        """Wait until the peer's kernel has everything that was sent."""
        with self._sending:
            while self._send_buffer and self._open:
                self._sending.wait()
        while self._far and self._open and _unacknowledged(self.sock):
            time.sleep(2e-4)

    def stop_sending(self) -> None:
        """Drop what was not sent, and wake the threads that wait in `flush`."""
        with self._sending:
            self._open = False
            self._send_buffer.clear()
            self._sending.notify_all()
            with suppress(OSError):
                self.sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the socket, which no thread may be using."""
        self._open = False
        self.sock.close()

    # -- receiving, in the reader's thread only ---------------------------------------------------

    def read(self) -> bool:
        """Receive what the socket has; whether more may follow."""
        try:
            for _ in range(MOST_READS):
                if self._incoming is not None:
                    head, body, rest = self._incoming
                    got = self.sock.recv_into(rest)
                    self._take_body(head, body, rest[got:])
                else:
                    got = self.sock.recv_into(self._staging[self._filled :])
                    self._filled += got
                    self._take_frames()
                if not got:
                    return self._close("its connection was closed")
        except BlockingIOError:
            return True
        except Garbled as error:
            log.warning("closed the link to rank %d: it sent garbage: %s", self.peer, error)
            return self._close(f"it sent garbage: {error}")
        except OSError as error:
            return self._close(f"its connection broke: {error.strerror or error}")
        return True

    def _close(self, why: str) -> bool:
        self._sink.link_closed(self.peer, why)
        self._shut_down()
        return False

    def _shut_down(self) -> None:
        """Close both directions; what has arrived can still be read."""
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def _take_frames(self) -> None:
        start, have = 0, self._filled
        while have - start >= wire.PREFIX.size:
            kind, header, body = wire.unpack_prefix(self._staging[start:have])
            text = start + wire.PREFIX.size
            if have - text < header:
                self._compact(start, wire.PREFIX.size + header)
                return
            start = text + header
            self._take_frame(kind, self._staging[text:start], body)
            if self._incoming is not None:
                head, memory, rest = self._incoming
                got = min(len(rest), have - start)
                rest[:got] = self._staging[start : start + got]
                start += got
                self._take_body(head, memory, rest[got:])
        self._compact(start, 0)

    def _take_frame(self, kind: int, text: memoryview, body: int) -> None:
        if kind == wire.RELEASE:
            self._sink.acknowledged(self.peer, wire.unpack_acks(text))
        elif kind == wire.LEAVE:
            self._sink.left(self.peer)
        else:
            head = wire.unpack(text, body)
            if self._far and any([header.region for header in head.tensors]):
                raise Garbled("it refers to shared memory of another host")
            if head.acks:
                self._sink.acknowledged(self.peer, head.acks)
            if body:
                memory = self._receive_buffer(head, body)
                self._incoming = head, memory, memoryview(memory.numpy())[:body]  # type: ignore[arg-type]
            else:
                self._sink.received(self.peer, head, None)

    def _receive_buffer(self, head: Head, nbytes: int) -> Tensor:
        try:
            return self._sink.receive_buffer(self.peer, head, nbytes)
        except (RuntimeError, MemoryError):  # raised by torch, and by Python
            raise Garbled(f"it announces a body of {nbytes} bytes, for which there is no memory") from None

    def _take_body(self, head: Head, body: Tensor, rest: memoryview) -> None:
        if rest:
            self._incoming = head, body, rest
        else:
            self._incoming = None
            self._sink.received(self.peer, head, body)

    def _compact(self, start: int, need: int) -> None:
        """Move the unread bytes to the front, into a larger buffer if `need` bytes do not fit."""
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
