"""The line between a rank and whoever watches over it: small messages, and memory handed over as open files.

rank -> watcher                                   watcher -> rank
  hello    rank pid address                         everyone  addresses gone   where the others are, or why not
  reached                                           begin     at            all have reached all others, and when
  memory   name nbytes                              memory    name error    the open file comes with it
  grant    name number                              granted   yes closed coming arrivals
  enter    name number                              entered   taken over arrivals
  arrived  name
  at       step, when asked to finish               stop      step          how far all go
  lines    rows                                     lost      rank why      fenced: it can do no more harm
  left     a clean exit                             abort     error         the run is over, and why
  failed   error                                    finish                  stop at the next good moment, save
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
Message = tuple[str, Fields, int | None]


class HungUp(ManyhandsError):
    """The other end of the line is gone."""


class Line:
    """One end of a line over a connected socket of this host. Any thread may send, one thread receives."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._sending = threading.Lock()
        self._pieces = bytearray()
        self._files: list[int] = []

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, kind: str, fields: Fields | None = None, *, file: int | None = None) -> None:
        """Say something; an open file may go with it. Nothing happens if nobody is there any more."""
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
            pass  # the reading side will notice

    def receive(self) -> Message:
        """Wait for the next message: kind, fields, and the file that came with it."""
        while (message := self._next()) is None:
            self._fill()
        return message

    def arrived(self) -> Iterator[Message]:
        """Whatever has come so far, without waiting."""
        while True:
            while (message := self._next()) is not None:
                yield message
            if not self._fill(socket.MSG_DONTWAIT):
                return

    def _next(self) -> Message | None:
        if len(self._pieces) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._pieces)
        if length > LONGEST:
            raise HungUp(f"a message of {length} bytes is longer than {LONGEST}")
        end = _LENGTH.size + length
        if len(self._pieces) < end:
            return None
        try:
            kind, fields = msgpack.unpackb(bytes(self._pieces[_LENGTH.size : end]), use_list=False)
            with_file = kind == "memory" and fields.get("error") == ""
        except (ValueError, AttributeError, TypeError) as error:
            raise HungUp(f"what it says cannot be read: {error}") from None
        del self._pieces[:end]
        return kind, fields, self._files.pop(0) if with_file and self._files else None

    def _fill(self, flags: int = 0) -> bool:
        """Read once; whether there was anything. Only a call that must not wait finds nothing."""
        room = socket.CMSG_SPACE(4 * array.array("i").itemsize)
        try:
            data, ancillary, _, _ = self.sock.recvmsg(2**16, room, flags | socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return False
        except OSError as error:
            raise HungUp(str(error)) from None
        for level, kind, payload in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                files = array.array("i")
                files.frombytes(payload[: len(payload) - len(payload) % files.itemsize])
                self._files += files
        if not data:
            raise HungUp("the other end is gone")
        self._pieces += data
        return True

    def hang_up(self) -> None:
        """Both sides hear that it is over, also whoever is listening on this one."""
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for file in self._files:
            os.close(file)
        self._files.clear()
        self.sock.close()
