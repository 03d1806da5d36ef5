"""Several hosts, each with a watcher of its own: that of rank 0's host (the hub) decides, the others carry.

up    host ranks · heard rank kind fields · gone rank why code · finish · abort error · beat
down  say to kind fields · beat

A host is judged by its watcher's heartbeats, which no rank's work can delay. One that is not heard of is lost with all
its ranks; on its side of the cut the run is over.
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
from manyhands.runtime.control import Fields, HungUp, Line
from manyhands.runtime.door import Door
from manyhands.runtime.failures import Facts
from manyhands.runtime.roll import Roll
from manyhands.runtime.secret import Stranger, introduce
from manyhands.runtime.watch import Watcher

log = logging.getLogger("manyhands")

BEAT = 0.3
SILENCE = 2.0
"""Seconds between heartbeats, and without one until a host is lost."""
SILENT = f"its host has not been heard of for {SILENCE:g} s"


class Wire:
    """A line to another watcher: `hear(kind, fields)` for what it says, `cut()` when it is not heard of any more."""

    def __init__(
        self, line: Line, watcher: Watcher, hear: Callable[[str, Fields], None], cut: Callable[[], None]
    ) -> None:
        self._line = line
        self._events = watcher.events
        self._hear, self._cut = hear, cut
        self._heard_at = time.monotonic()
        self._closed = threading.Event()
        self._pulse = threading.Thread(target=self._beat, name="manyhands-pulse", daemon=True)

    def open(self) -> None:
        """Begin to listen and to beat."""
        self._line.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._events.on(self._line, self._read)
        self._pulse.start()
        self._look()

    def send(self, kind: str, fields: Fields) -> None:
        self._line.send(kind, fields)

    def close(self) -> None:
        """No more words; a second call does nothing."""
        if not self._closed.is_set():
            self._closed.set()
            self._pulse.join()
            self._events.off(self._line)
            self._line.close()

    def part(self) -> None:
        """Hang up so that our last words arrive: a socket closed with something unread may take them with it."""
        if not self._closed.is_set():
            with suppress(OSError):
                self._line.sock.shutdown(socket.SHUT_WR)
                self._line.sock.settimeout(SILENCE)
                while self._line.sock.recv(2**16):
                    pass
        self.close()

    def _beat(self) -> None:
        while not self._closed.wait(BEAT):
            self._line.send("beat")

    def _read(self) -> None:
        try:
            for kind, fields, _ in self._line.arrived():
                self._heard_at = time.monotonic()
                if kind != "beat":
                    self._hear(kind, fields)
        except HungUp:
            self.close()
            self._cut()

    def _look(self) -> None:
        """Judge by what has come, not by when we found time to read it."""
        if not self._closed.is_set():
            self._read()
        if not self._closed.is_set():
            if time.monotonic() - self._heard_at > SILENCE:
                self.close()
                self._cut()
            else:
                self._events.later(BEAT, self._look)


class Hub(Roll):
    """The authority over a job on several hosts."""

    def __init__(self, watcher: Watcher, listener: socket.socket) -> None:
        super().__init__(watcher.seat.size, self._say_everywhere, watcher.seat.late)
        self._watcher = watcher
        self._wires: dict[Wire, set[int]] = {}
        self._door = Door(listener, watcher.seat.secret, watcher.events, self._admitted)

    @property
    def over(self) -> bool:
        """The watchers of other hosts hang up when their ranks have ended."""
        return not self._wires

    def close(self) -> None:
        self._door.close()
        for wire in list(self._wires):
            wire.close()

    def _admitted(self, line: Line) -> None:
        alive: set[int] = set()
        wire = Wire(line, self._watcher, partial(self._carried, alive), lambda: self._cut_off(wire))
        self._wires[wire] = alive
        wire.open()

    def _carried(self, alive: set[int], kind: str, fields: Fields) -> None:
        if kind == "host":
            alive.update(fields["ranks"])
        elif kind == "heard":
            self.heard(fields["rank"], fields["kind"], fields["fields"])
        elif kind == "gone":
            alive.discard(fields["rank"])
            self.gone(fields["rank"], fields["why"], fields["code"])
        elif kind == "finish":
            self.finish()
        elif kind == "abort":
            self.abort(fields["error"])

    def _cut_off(self, wire: Wire) -> None:
        for rank in sorted(self._wires.pop(wire)):
            self.gone(rank, SILENT, None)

    def _say_everywhere(self, to: Sequence[int], kind: str, fields: Fields) -> None:
        self._watcher.say(to, kind, fields)
        for wire in self._wires:
            wire.send("say", {"to": list(to), "kind": kind, "fields": fields})


class Uplink:
    """The way to the hub."""

    over = True

    def __init__(self, watcher: Watcher, sock: socket.socket) -> None:
        self._watcher = watcher
        self._wire = Wire(Line(sock), watcher, self._hear, self._cut_off)
        self._wire.open()
        self._wire.send("host", {"ranks": sorted(watcher.ranks)})

    def heard(self, rank: int, kind: str, fields: Fields) -> None:
        self._wire.send("heard", {"rank": rank, "kind": kind, "fields": fields})
        if kind == "failed":  # the hub will say so too, but this host may be empty by then
            self._abort_here(fields["error"])

    def gone(self, rank: int, why: str, code: int | None) -> None:
        self._wire.send("gone", {"rank": rank, "why": why, "code": code})

    def late(self, deadline: float) -> None:
        """The hub looks at its own clock."""

    def finish(self) -> None:
        self._wire.send("finish", {})

    def abort(self, cause: Facts) -> None:
        self._wire.send("abort", {"error": cause})
        self._abort_here(cause)

    def close(self) -> None:
        self._wire.part()

    def _hear(self, kind: str, fields: Fields) -> None:
        if kind == "say":
            self._watcher.say(fields["to"], fields["kind"], fields["fields"])

    def _cut_off(self) -> None:
        self._abort_here({"kind": "lost", "rank": 0, "why": SILENT})

    def _abort_here(self, cause: Facts) -> None:
        if self._watcher.cause is None:
            self._watcher.say(sorted(self._watcher.ranks), "abort", {"error": cause})


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
