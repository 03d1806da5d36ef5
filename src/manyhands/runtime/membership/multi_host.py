"""Several hosts, each with a watcher: that of rank 0's host (the hub) decides, the others forward.

up    host ranks · message rank kind fields · exit rank why code · finish · abort error · heartbeat
down  send to kind fields · heartbeat

A host is judged by its watcher's heartbeats, which no rank's work can delay. A silent host is lost with all its ranks;
on its own side of the cut the run is over.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial

from manyhands.core.errors import ManyhandsError
from manyhands.runtime.membership.auth_listener import AuthListener
from manyhands.runtime.membership.control_channel import ChannelClosed, ControlChannel, Fields
from manyhands.runtime.membership.error_codec import Facts
from manyhands.runtime.membership.membership import Membership
from manyhands.runtime.membership.secret import Stranger, introduce
from manyhands.runtime.membership.watcher import Watcher

log = logging.getLogger("manyhands")

HEARTBEAT = 0.3
SILENCE = 2.0
"""Seconds between heartbeats, and without one until a host is lost."""
SILENT = f"its host has sent no heartbeat for {SILENCE:g} s"


class WatcherLink:
    """A connection between two watchers.

    Args:
        channel: the authenticated connection.
        watcher: the local end, whose loop reads it.
        on_message: called with the kind and the fields of every message but heartbeats.
        on_lost: called when the other end is silent or has closed the connection.
    """

    def __init__(
        self,
        channel: ControlChannel,
        watcher: Watcher,
        on_message: Callable[[str, Fields], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._channel = channel
        self._loop = watcher.loop
        self._on_message, self._on_lost = on_message, on_lost
        self._received_at = time.monotonic()
        self._closed = threading.Event()
        self._heartbeats = threading.Thread(target=self._send_heartbeats, name="manyhands-heartbeat", daemon=True)

    def open(self) -> None:
        """Begin to read, and to send heartbeats."""
        self._channel.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._loop.on_readable(self._channel, self._read)
        self._heartbeats.start()
        self._check_heartbeat()

    def send(self, kind: str, fields: Fields) -> None:
        """Send a message to the other watcher."""
        self._channel.send(kind, fields)

    def close(self) -> None:
        """Close the connection; a second call does nothing."""
        if not self._closed.is_set():
            self._closed.set()
            self._heartbeats.join()
            self._loop.remove(self._channel)
            self._channel.close()

    def drain_and_close(self) -> None:
        """Close after our last messages have arrived: closing a socket with unread input may discard its output."""
        if not self._closed.is_set():
            with suppress(OSError):
                self._channel.sock.shutdown(socket.SHUT_WR)
                self._channel.sock.settimeout(SILENCE)
                while self._channel.sock.recv(2**16):
                    pass
        self.close()

    def _send_heartbeats(self) -> None:
        while not self._closed.wait(HEARTBEAT):
            self._channel.send("heartbeat")

    def _read(self) -> None:
        try:
            for kind, fields, _ in self._channel.received():
                self._received_at = time.monotonic()
                if kind != "heartbeat":
                    self._on_message(kind, fields)
        except ChannelClosed:
            self.close()
            self._on_lost()

    def _check_heartbeat(self) -> None:
        """Read first: a busy loop must not take unread heartbeats for silence."""
        if not self._closed.is_set():
            self._read()
        if not self._closed.is_set():
            if time.monotonic() - self._received_at > SILENCE:
                self.close()
                self._on_lost()
            else:
                self._loop.later(HEARTBEAT, self._check_heartbeat)


class Hub(Membership):
    """The authority over a job on several hosts; `listener` is where the other watchers connect."""

    def __init__(self, watcher: Watcher, listener: socket.socket) -> None:
        super().__init__(watcher.spec.size, self._send_everywhere, watcher.spec.pending_ranks)
        self._watcher = watcher
        self._links: dict[WatcherLink, set[int]] = {}
        self._listener = AuthListener(listener, watcher.spec.secret, watcher.loop, self._admitted)

    @property
    def done(self) -> bool:
        """The other watchers close their links when their ranks have ended."""
        return not self._links

    def close(self) -> None:
        """Stop listening, and close the links to the other watchers."""
        self._listener.close()
        for link in list(self._links):
            link.close()

    def _admitted(self, sock: socket.socket, _: bytes) -> None:
        alive: set[int] = set()
        link = WatcherLink(
            ControlChannel(sock), self._watcher, partial(self._on_forwarded, alive), lambda: self._on_lost(link)
        )
        self._links[link] = alive
        link.open()

    def _on_forwarded(self, alive: set[int], kind: str, fields: Fields) -> None:
        if kind == "host":
            alive.update(fields["ranks"])
        elif kind == "message":
            self.on_message(fields["rank"], fields["kind"], fields["fields"])
        elif kind == "exit":
            alive.discard(fields["rank"])
            self.on_exit(fields["rank"], fields["why"], fields["code"])
        elif kind == "finish":
            self.finish()
        elif kind == "abort":
            self.abort(fields["error"])

    def _on_lost(self, link: WatcherLink) -> None:
        for rank in sorted(self._links.pop(link)):
            self.on_exit(rank, SILENT, None)

    def _send_everywhere(self, to: Sequence[int], kind: str, fields: Fields) -> None:
        self._watcher.send(to, kind, fields)
        for link in self._links:
            link.send("send", {"to": list(to), "kind": kind, "fields": fields})


class Uplink:
    """The authority on all other hosts: it forwards everything to the hub."""

    done = True

    def __init__(self, watcher: Watcher, sock: socket.socket) -> None:
        self._watcher = watcher
        self._link = WatcherLink(ControlChannel(sock), watcher, self._on_message, self._on_lost)
        self._link.open()
        self._link.send("host", {"ranks": sorted(watcher.ranks)})

    def on_message(self, rank: int, kind: str, fields: Fields) -> None:
        """Forward it; a failure also ends the ranks of this host at once."""
        self._link.send("message", {"rank": rank, "kind": kind, "fields": fields})
        if kind == "failed":  # the hub will send an abort too, but this host may have no ranks left by then
            self._abort_here(fields["error"])

    def on_exit(self, rank: int, why: str, code: int | None) -> None:
        """Forward it: the hub decides whether it is a loss."""
        self._link.send("exit", {"rank": rank, "why": why, "code": code})

    def on_deadline(self, deadline: float) -> None:
        """Do nothing: the hub has the same deadline."""

    def finish(self) -> None:
        """Forward it: all hosts stop together."""
        self._link.send("finish", {})

    def abort(self, cause: Facts) -> None:
        """Forward it, and end the ranks of this host at once."""
        self._link.send("abort", {"error": cause})
        self._abort_here(cause)

    def close(self) -> None:
        """Close the link to the hub after everything sent has arrived there."""
        self._link.drain_and_close()

    def _on_message(self, kind: str, fields: Fields) -> None:
        if kind == "send":
            self._watcher.send(fields["to"], fields["kind"], fields["fields"])

    def _on_lost(self) -> None:
        self._abort_here({"kind": "lost", "rank": 0, "why": SILENT})

    def _abort_here(self, cause: Facts) -> None:
        if self._watcher.cause is None:
            self._watcher.send(sorted(self._watcher.ranks), "abort", {"error": cause})


def reach_hub(address: str, key: bytes, ranks: Iterable[int], deadline: float) -> socket.socket:
    """Connect to the watcher of rank 0's host, which listens already."""
    host, _, port = address.rpartition(":")
    try:
        sock = socket.create_connection((host, int(port)), timeout=deadline)
        introduce(sock, key, b"watcher")
    except (OSError, Stranger) as error:
        here = ", ".join(map(str, ranks))
        raise ManyhandsError(f"the host of rank {here} cannot reach that of rank 0 at {address}: {error}") from None
    return sock
