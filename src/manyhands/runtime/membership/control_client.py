"""A rank's client of its watcher: it reports events, asks for shared memory and grants, and learns of losses."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from manyhands.core.errors import ManyhandsError, Refused
from manyhands.runtime.membership import error_codec
from manyhands.runtime.membership.control_channel import ChannelClosed, ControlChannel, Fields
from manyhands.runtime.membership.secret import introduce
from manyhands.runtime.rank_spec import RankSpec

GRACE = 5.0
"""Seconds a rank waits beyond the deadline: the watcher's error names the missing ranks, its own could not."""


class ControlClient:
    """One rank's membership of its job.

    Args:
        spec: which job, which rank.
        lost: called with every lost rank and the reason.
        abort: called with the error that ends the run.
    """

    def __init__(
        self, spec: RankSpec, lost: Callable[[int, str], None], abort: Callable[[BaseException], None]
    ) -> None:
        self._spec = spec
        self._lost, self._abort = lost, abort
        self.finishing = False
        """Whether the run is to stop after the current step."""
        self._ended = False
        self._freeze: Callable[[], int] = lambda: -1
        self._stop_at: Callable[[int], None] = lambda step: None
        self._changed = threading.Condition()
        self._answers: dict[str, Any] = {}
        self._error: BaseException | None = None
        self._channel = ControlChannel(_connect(spec))
        self.thread = threading.Thread(target=self._listen, name="manyhands control", daemon=True)
        self.thread.start()

    # -- joining ----------------------------------------------------------------------------------

    def hello(self, address: str) -> tuple[dict[int, str], dict[int, str]]:
        """Report our address; wait for the addresses of all ranks, and the reasons why some of them are gone."""
        spec = self._spec
        hello = {"rank": spec.rank, "pid": os.getpid(), "address": address, "session": spec.session}
        self._channel.send("hello", hello)
        answer = self._wait("addresses", self._spec.deadline + GRACE)
        return dict(answer["addresses"]), dict(answer["gone"])

    def connected(self) -> float:
        """Report that we are connected to all others; wait until all ranks are, and return when the job began."""
        self._channel.send("connected")
        return float(self._wait("begin", self._spec.deadline + GRACE)["at"])

    # -- requests ---------------------------------------------------------------------------------

    def memory(self, name: str, nbytes: int) -> int:
        """The file descriptor of a region of shared memory of this host."""
        self._channel.send("memory", {"name": name, "nbytes": nbytes})
        answer = self._wait(f"memory {name}", GRACE * 4)
        if answer["error"]:
            raise ManyhandsError(answer["error"])
        file: int = answer["file"]
        return file

    def grant(self, name: str, number: int, closes: bool = True) -> Fields:
        """Ask for one more mini-batch of a budget; also whether it was closed early, and which ranks join it."""
        self._channel.send("grant", {"name": name, "number": number, "closes": closes})
        return dict(self._wait("granted", None))

    def enter(self, name: str, number: int) -> Fields:
        """Begin to join a budget; how much of it is taken, and whether it is used up."""
        self._channel.send("enter", {"name": name, "number": number})
        return dict(self._wait("entered", None))

    def arrived(self, name: str) -> None:
        """Report that this rank has finished joining a budget, and is ready to work."""
        self._channel.send("arrived", {"name": name})

    def on_finish(self, freeze: Callable[[], int], stop_at: Callable[[int], None]) -> None:
        """To stop early, `freeze` returns how many steps were begun, and `stop_at` gets how many all ranks take."""
        with self._changed:
            self._freeze, self._stop_at = freeze, stop_at
        if self.finishing:
            self._send_progress()

    def ask_to_finish(self) -> None:
        """Ask for the stop of all ranks after their current step; a second request changes nothing."""
        self._channel.send("finish")

    def knows_of_stop(self) -> None:
        """Report that this rank's program knows of the stop, and may need time to save: it is not ended before."""
        self._channel.send("stopping")

    def check(self) -> None:
        """Raise the error that has ended this run, if there is one."""
        if self._error is not None:
            raise self._error

    def send_lines(self, rows: list[Any]) -> None:
        """Send lines of the record to the launching process, in the form that its `on_lines` takes."""
        self._channel.send("lines", {"rows": rows})

    def left(self) -> None:
        """Report a clean exit."""
        self._ended = True
        self._channel.send("left")

    def end_as_lost(self, why: str) -> NoReturn:
        """Report that this process ends as if it had been killed, and end it; the others may continue without it."""
        self._ended = True
        self._channel.send("lost", {"why": why})
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)

    def failed(self, error: BaseException) -> None:
        """Report that `error` ends this rank, and thereby the run."""
        self._ended = True
        self._channel.send("failed", {"error": error_codec.pack(error, self._spec.rank)})
        error_codec.mark_reported(error)

    def shut_down(self) -> None:
        """Close the channel and end its thread."""
        self._ended = True
        self._channel.shut_down()

    def close(self) -> None:
        """Close the socket; the thread must have ended."""
        self._channel.close()

    # -- receiving --------------------------------------------------------------------------------

    def _wait(self, what: str, seconds: float | None) -> Any:
        with self._changed:
            answered = self._changed.wait_for(lambda: what in self._answers or self._error is not None, seconds)
            if self._error is not None:
                raise self._error
            if not answered:
                raise Refused(f"rank {self._spec.rank} has got no {what!r} from its watcher within {seconds:.0f} s")
            return self._answers.pop(what)

    def _listen(self) -> None:
        while True:
            try:
                kind, fields, file = self._channel.receive()
            except ChannelClosed:
                if not self._ended:
                    print("manyhands: the watcher of this run has ended: stopping", file=sys.stderr, flush=True)
                    os._exit(1)
                return
            self._on_message(kind, fields, file)

    def _send_progress(self) -> None:
        self._channel.send("progress", {"step": self._freeze()})

    def _on_message(self, kind: str, fields: Fields, file: int | None) -> None:
        if kind == "lost":
            self._lost(fields["rank"], fields["why"])
        elif kind == "finish":
            self.finishing = True
            self._send_progress()
        elif kind == "stop":
            self._stop_at(fields["step"])
        elif kind == "abort":
            error = error_codec.unpack(fields["error"])
            error_codec.mark_reported(error)
            with self._changed:
                self._error = error
                self._changed.notify_all()
            self._abort(error)
        else:
            with self._changed:
                name = f"memory {fields['name']}" if kind == "memory" else kind
                self._answers[name] = {**fields, "file": file}
                self._changed.notify_all()


def _connect(spec: RankSpec) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.connect(f"\0{spec.watcher}")
    except OSError as error:
        raise Refused(f"rank {spec.rank} cannot reach the watcher of this run: {error.strerror}") from None
    introduce(sock, spec.secret, str(spec.rank).encode())
    return sock
