"""A listening socket of a job: every connection must prove the job's secret before anything it sends is read.

Each proof runs in a thread of its own, so that a silent stranger delays no other connection.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from manyhands.runtime.membership.event_loop import EventLoop
from manyhands.runtime.membership.secret import Stranger, admit

log = logging.getLogger("manyhands")

MOST_PENDING = 64
"""Connections that may be unproved at the same time."""


class AuthListener:
    """Accepts connections, checks their proof and hands them over.

    Args:
        listener: the listening socket; owned from now on.
        key: the job's secret.
        loop: whose thread accepts connections and calls `admitted`.
        admitted: takes a connection that has proved the secret, and its introduction; raises `Stranger` to reject it.
        owner: names the rejecting side in the log, such as "rank 3".
    """

    def __init__(
        self,
        listener: socket.socket,
        key: bytes,
        loop: EventLoop,
        admitted: Callable[[socket.socket, bytes], None],
        owner: str = "the watcher",
    ) -> None:
        self._listener = listener
        self._key = key
        self._loop = loop
        self._admitted = admitted
        self._owner = owner
        self._pending: dict[socket.socket, threading.Thread] = {}
        self._closing = False
        listener.setblocking(False)
        loop.post(lambda: loop.on_readable(listener, self._accept))

    def close(self) -> None:
        """Stop listening, and close the connections that are not proved yet."""
        self._closing = True
        self._loop.remove(self._listener)
        self._listener.close()
        for sock, thread in self._pending.items():
            with suppress(OSError):  # the other side has closed it already
                sock.shutdown(socket.SHUT_RDWR)
            thread.join()
            sock.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:  # the other side has closed it already
            return
        if len(self._pending) >= MOST_PENDING:
            self._reject(sock, f"{MOST_PENDING} other connections have not proved the job's secret yet")
            return
        sock.setblocking(True)
        thread = threading.Thread(target=self._check, args=(sock,), name="manyhands-auth", daemon=True)
        self._pending[sock] = thread
        thread.start()

    def _check(self, sock: socket.socket) -> None:
        try:
            introduction = admit(sock, self._key)
        except Stranger as error:
            self._loop.post(partial(self._proved, sock, None, str(error)))
        else:
            self._loop.post(partial(self._proved, sock, introduction))

    def _proved(self, sock: socket.socket, introduction: bytes | None, why: str = "") -> None:
        """In the loop's thread: the proof has succeeded, or failed because of `why`."""
        self._pending.pop(sock).join()  # posting was the last thing it did
        if introduction is None:
            self._reject(sock, why)
            return
        try:
            self._admitted(sock, introduction)
        except (Stranger, OSError) as error:  # it is not expected here, or has closed the connection since
            self._reject(sock, str(error))

    def _reject(self, sock: socket.socket, why: str) -> None:
        if not self._closing:
            log.warning("%s rejected a connection: %s", self._owner, why)
        sock.close()
