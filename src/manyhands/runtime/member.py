"""Member: a rank's line to whoever watches over its host: news comes in, memory is asked for, the end is told."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

from manyhands.core.errors import ManyhandsError, Refused
from manyhands.runtime import failures
from manyhands.runtime.control import Fields, HungUp, Line
from manyhands.runtime.seat import Seat
from manyhands.runtime.secret import introduce

GRACE = 5.0
"""Seconds beyond the deadline: whoever watches names the late ones, a rank alone cannot."""


class Member:
    """One rank's membership of its job.

    Args:
        seat: which job, which rank.
        lost: told of every rank that is lost, and why.
        abort: told the error that ends the run.
    """

    def __init__(self, seat: Seat, lost: Callable[[int, str], None], abort: Callable[[BaseException], None]) -> None:
        self._seat = seat
        self._lost, self._abort = lost, abort
        self.finishing = False
        """Whether the run is to stop at the next good moment."""
        self._over = False
        self._freeze: Callable[[], int] = lambda: -1
        self._stop_at: Callable[[int], None] = lambda step: None
        self._news = threading.Condition()
        self._said: dict[str, Any] = {}
        self._error: BaseException | None = None
        self._line = Line(_connect(seat))
        self.thread = threading.Thread(target=self._listen, name="manyhands member", daemon=True)
        self.thread.start()

    # -- joining ----------------------------------------------------------------------------------

    def hello(self, address: str) -> tuple[dict[int, str], dict[int, str]]:
        """Say where we are; the addresses of all, as soon as all have come, and why some of them are gone."""
        self._line.send("hello", {"rank": self._seat.rank, "pid": os.getpid(), "address": address})
        said = self._wait("everyone", self._seat.deadline + GRACE)
        return dict(said["addresses"]), dict(said["gone"])

    def reached(self) -> float:
        """Say that we have reached everyone; returns when that is so for all, and says when the job began."""
        self._line.send("reached")
        return float(self._wait("begin", self._seat.deadline + GRACE)["at"])

    # -- asking -----------------------------------------------------------------------------------

    def memory(self, name: str, nbytes: int) -> int:
        """The open file of a region of this host."""
        self._line.send("memory", {"name": name, "nbytes": nbytes})
        answer = self._wait(f"memory {name}", GRACE * 4)
        if answer["error"]:
            raise ManyhandsError(answer["error"])
        file: int = answer["file"]
        return file

    def grant(self, name: str, number: int) -> Fields:
        """Whether one more mini-batch may be taken of this budget, whether it was closed early, and who comes to it."""
        self._line.send("grant", {"name": name, "number": number})
        return dict(self._wait("granted", None))

    def enter(self, name: str, number: int) -> Fields:
        """Come to this budget; says how much of it is taken, and whether it is used up."""
        self._line.send("enter", {"name": name, "number": number})
        return dict(self._wait("entered", None))

    def arrived(self, name: str) -> None:
        """Whoever came to this budget is ready to work."""
        self._line.send("arrived", {"name": name})

    def on_finish(self, freeze: Callable[[], int], stop_at: Callable[[int], None]) -> None:
        """If the run is to stop early, `freeze` says how many steps were begun, `stop_at` hears how many to take."""
        with self._news:
            self._freeze, self._stop_at = freeze, stop_at
        if self.finishing:
            self._say_where()

    def check(self) -> None:
        """Raise what has ended this run."""
        if self._error is not None:
            raise self._error

    def tell(self, rows: list[Any]) -> None:
        """Hand over lines of the record, in whatever form whoever launched us expects."""
        self._line.send("lines", {"rows": rows})

    def left(self) -> None:
        """A clean exit."""
        self._over = True
        self._line.send("left")

    def failed(self, error: BaseException) -> None:
        """This rank ends the run."""
        self._over = True
        self._line.send("failed", {"error": failures.pack(error, self._seat.rank)})
        failures.note_told(error)

    def hang_up(self) -> None:
        """Say and hear nothing more."""
        self._over = True
        self._line.hang_up()

    # -- listening --------------------------------------------------------------------------------

    def _wait(self, what: str, seconds: float | None) -> Any:
        with self._news:
            come = self._news.wait_for(lambda: what in self._said or self._error is not None, seconds)
            if self._error is not None:
                raise self._error
            if not come:
                raise Refused(
                    f"rank {self._seat.rank} has waited {seconds:.0f} s for {what!r}, and nobody has answered"
                )
            return self._said.pop(what)

    def _listen(self) -> None:
        while True:
            try:
                kind, fields, file = self._line.receive()
            except HungUp:
                if not self._over:
                    print("manyhands: whoever watched over this run is gone: stopping", file=sys.stderr, flush=True)
                    os._exit(1)
                return
            self._hear(kind, fields, file)

    def _say_where(self) -> None:
        self._line.send("at", {"step": self._freeze()})

    def _hear(self, kind: str, fields: Fields, file: int | None) -> None:
        if kind == "lost":
            self._lost(fields["rank"], fields["why"])
        elif kind == "finish":
            self.finishing = True
            self._say_where()
        elif kind == "stop":
            self._stop_at(fields["step"])
        elif kind == "abort":
            error = failures.unpack(fields["error"])
            with self._news:
                self._error = error
                self._news.notify_all()
            self._abort(error)
        else:
            with self._news:
                name = f"memory {fields['name']}" if kind == "memory" else kind
                self._said[name] = {**fields, "file": file}
                self._news.notify_all()


def _connect(seat: Seat) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.connect(f"\0{seat.watcher}")
    except OSError as error:
        raise Refused(f"rank {seat.rank} finds nobody who watches over this run ({error.strerror})") from None
    introduce(sock, seat.secret, str(seat.rank).encode())
    return sock
