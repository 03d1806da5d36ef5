"""Door: where members of a job come in. Each proves the secret in a thread of its own; strangers are turned away."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from manyhands.runtime.control import Line
from manyhands.runtime.events import Events
from manyhands.runtime.secret import Stranger, admit

log = logging.getLogger("manyhands")

AT_ONCE = 64
"""Callers whose proof is still awaited."""


class Door:
    """Calls `admitted(line)` in the thread of `events` for each who has proved to belong to the job."""

    def __init__(self, listener: socket.socket, key: bytes, events: Events, admitted: Callable[[Line], None]) -> None:
        self._listener = listener
        self._key = key
        self._events = events
        self._admitted = admitted
        self._callers: dict[socket.socket, threading.Thread] = {}
        self._closing = False
        listener.setblocking(False)
        events.on(listener, self._answer)

    def close(self) -> None:
        """Nobody comes in any more; whoever is about to is sent away."""
        self._closing = True
        self._events.off(self._listener)
        self._listener.close()
        for sock, thread in self._callers.items():
            _hang_up(sock)
            thread.join()
            sock.close()

    def _answer(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:  # it has gone already
            return
        if len(self._callers) >= AT_ONCE:
            log.warning("a connection was turned away: %d others are still to prove themselves", AT_ONCE)
            sock.close()
            return
        sock.setblocking(True)
        thread = threading.Thread(target=self._prove, args=(sock,), name="manyhands-door", daemon=True)
        self._callers[sock] = thread
        thread.start()

    def _prove(self, sock: socket.socket) -> None:
        try:
            admit(sock, self._key)
        except Stranger as error:
            if not self._closing:
                log.warning("a connection was turned away: %s", error)
            self._events.post(partial(self._turn_away, sock))
        else:
            self._events.post(partial(self._let_in, sock))

    def _turn_away(self, sock: socket.socket) -> None:
        del self._callers[sock]
        sock.close()

    def _let_in(self, sock: socket.socket) -> None:
        del self._callers[sock]
        self._admitted(Line(sock))


def _hang_up(sock: socket.socket) -> None:
    with suppress(OSError):  # the other side was faster
        sock.shutdown(socket.SHUT_RDWR)
