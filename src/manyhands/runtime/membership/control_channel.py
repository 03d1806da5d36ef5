"""The control channel between a rank and its watcher: small messages, and shared memory as open file descriptors.

rank -> watcher                                    watcher -> rank
  hello      rank pid address session                addresses  addresses gone  of the present ranks; why others left
  connected                                          begin      at              all ranks are connected; the start time
  memory     name nbytes                             memory     name error      carries the open file descriptor
  grant      name number closes                      granted    yes closed joining arrivals
  enter      name number                             entered    taken over arrivals
  arrived    name
  progress   step, the answer to finish              stop       step            all ranks stop after this many steps
  lines      rows                                    lost       rank why        it is fenced: it can do nothing more
  left       a clean exit                            abort      error           the run is over, and why
  failed     error                                   finish                     stop after the current step, and save
  lost       why: it ends as if it had died
  finish     this rank was asked to stop
  stopping   its program knows that it is to stop
"""

from __future__ import annotations

import array
import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgpack

from manyhands.core.errors import ManyhandsError

LONGEST = 64 * 2**20
"""Bytes of one message."""
_LENGTH = struct.Struct("<I")

Fields = dict[str, Any]
ControlMessage = tuple[str, Fields, int | None]
"""Kind, fields, and the file descriptor that came with it."""


class ChannelClosed(ManyhandsError):
    """The other end has closed the channel, or broken its protocol."""


class ControlChannel:
    """One end of a connected socket. Any thread may send, one thread receives."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._sending = threading.Lock()
        self._unread = bytearray()
        self._files: list[int] = []

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, kind: str, fields: Fields | None = None, *, file: int | None = None) -> None:
        """Send a message, with a file descriptor if one is given; on a closed channel it is dropped."""
        text = msgpack.packb([kind, fields or {}])
        data = memoryview(_LENGTH.pack(len(text)) + text)
        try:
            with self._sending:
                if file is not None:
                    sent = socket.send_fds(self.sock, [data], [file])
                    data = data[sent:]
                if data:
                    self.sock.sendall(data)
        except OSError:
            pass  # the receiving thread finds the channel closed

    def receive(self) -> ControlMessage:
        """Wait for the next message."""
        while (message := self._next()) is None:
            self._fill()
        return message

    def received(self) -> Iterator[ControlMessage]:
        """The messages that have arrived so far, without waiting."""
        while True:
            while (message := self._next()) is not None:
                yield message
            if not self._fill(socket.MSG_DONTWAIT):
                return

    def _next(self) -> ControlMessage | None:
        if len(self._unread) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._unread)
        if length > LONGEST:
            raise ChannelClosed(f"a control message has {length} bytes, but must have at most {LONGEST}")
        end = _LENGTH.size + length
        if len(self._unread) < end:
            return None
        try:
            kind, fields = msgpack.unpackb(bytes(self._unread[_LENGTH.size : end]), use_list=False)
            with_file = kind == "memory" and fields.get("error") == ""
        except (ValueError, AttributeError, TypeError) as error:
            raise ChannelClosed(f"a control message cannot be decoded: {error}") from None
        del self._unread[:end]
        return kind, fields, self._files.pop(0) if with_file and self._files else None

    def _fill(self, flags: int = 0) -> bool:
        """Read once; whether there was anything, which is certain unless `flags` forbid to wait."""
        room = socket.CMSG_SPACE(4 * array.array("i").itemsize)
        try:
            data, ancillary, _, _ = self.sock.recvmsg(2**16, room, flags | socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return False
        except OSError as error:
            raise ChannelClosed(str(error)) from None
        for level, kind, payload in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                files = array.array("i")
                files.frombytes(payload[: len(payload) - len(payload) % files.itemsize])
                self._files += files
        if not data:
            raise ChannelClosed("the other end has closed it")
        self._unread += data
        return True

    def shut_down(self) -> None:
        """End both directions, which also wakes a thread of ours that waits in `receive`."""
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket, and the file descriptors that were never asked for."""
        for file in self._files:
            os.close(file)
        self._files.clear()
        self.sock.close()
