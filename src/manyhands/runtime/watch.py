"""Watcher: looks after the ranks of one host.

It knows them by the job's secret, hands out memory, and sees who dies or is stopped. What ranks say it carries to
whoever decides about the job, and the answers back: to a `Roll` of its own, or to one on another host (`hosts`).
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Protocol

from manyhands.runtime.control import Fields, HungUp, Line
from manyhands.runtime.door import Door
from manyhands.runtime.events import Events
from manyhands.runtime.failures import Facts, pack
from manyhands.runtime.memfd import Memories
from manyhands.runtime.roll import Roll
from manyhands.runtime.seat import Seat
from manyhands.runtime.secret import Stranger
from manyhands.runtime.vigil import Ending, Vigil

log = logging.getLogger("manyhands")

GRACE = 1.0
"""Seconds between the end of a run and the end of ranks that do not end themselves."""
HASTE = 0.5
"""The same when somebody waits for it."""
PATIENCE = 30.0
"""Seconds in which ranks that are to stop must come to a good moment."""


class Authority(Protocol):
    """Whoever decides about a job: a `Roll`, or the way to it. Called in the watcher's thread only."""

    @property
    def over(self) -> bool:
        """Whether no other host needs this watcher."""

    def heard(self, rank: int, kind: str, fields: Fields) -> None:
        """A rank has said something."""

    def gone(self, rank: int, why: str, code: int | None) -> None:
        """A rank's process has ended."""

    def late(self, deadline: float) -> None:
        """The time to come together is over."""

    def finish(self) -> None:
        """Everyone is to stop at the next good moment."""

    def abort(self, cause: Facts) -> None:
        """The run is over."""

    def close(self) -> None:
        """Everyone has ended."""


class Watcher:
    """Watches until every rank has ended. As a context manager it leaves no rank behind.

    Args:
        seat: the seat of any rank of this host.
        ranks: the ranks of this host; all, if not given.
        authority: makes whoever decides.
        on_lines: takes the rows that ranks send.
        on_loss: told when a rank is lost.
    """

    def __init__(
        self,
        seat: Seat,
        ranks: Iterable[int] | None = None,
        *,
        authority: Callable[[Watcher], Authority] | None = None,
        on_lines: Callable[[Any], None] | None = None,
        on_loss: Callable[[int], None] | None = None,
    ) -> None:
        self.seat = seat
        self.ranks = frozenset(range(seat.size) if ranks is None else ranks)
        self.lost: list[tuple[int, str]] = []
        self.endings: dict[int, Ending] = {}
        self.cause: Facts | None = None
        self._on_lines, self._on_loss = on_lines, on_loss
        self._lines: dict[int, Line] = {}
        self._speakers: dict[Line, int | None] = {}
        self._watched: set[int] = set()
        self._grace, self._patient, self._all_started = GRACE, False, False
        self._finishing = False
        self._error: Exception | None = None
        self._began = 0.0
        self.events = Events()
        self._door = Door(_listen(seat.watcher), seat.secret, self.events, self._admitted)
        self._vigil = Vigil(lambda rank, ending: self.events.post(partial(self._ended, rank, ending)))
        self._memories = Memories()
        self._authority = authority(self) if authority else Roll(seat.size, self.say, seat.late)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="manyhands-watcher", daemon=True)

    # For its owner

    def start(self, *, patient: bool = False) -> None:
        """Begin to watch. The deadline to come together counts from now or, if `patient`, from the first hello."""
        self._patient = patient
        if not patient:
            self._count_down()
        self._thread.start()

    def watch(self, rank: int, pid: int, exit_code: Callable[[], int | None] = lambda: None) -> None:
        """Look after this rank's process; of one that nobody names it is looked after from its hello on."""
        self._watched.add(rank)
        self._vigil.watch(rank, pid, exit_code)

    def finish(self) -> None:
        """Ask all ranks to stop at the next good moment; asked twice, stop at once. A signal handler may call this."""
        self.events.post(self._finish)

    def wait(self) -> None:
        """All ranks have been started: wait until they have ended."""
        self.events.post(self._may_end)
        self._done.wait()
        if self._error is not None:
            raise self._error

    def __enter__(self) -> Watcher:
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._thread.ident is None:
            self._close()
        else:
            self._stop(error or KeyboardInterrupt())
            self._thread.join()
        self.events.close()

    def _stop(self, error: BaseException) -> None:
        """End the run if it has not ended, whatever happens meanwhile."""
        self.events.post(partial(self._hurry, pack(error, self.seat.rank)))
        self.events.post(self._may_end)
        while not self._done.is_set():
            try:
                self._done.wait()
            except KeyboardInterrupt:  # it is being done
                continue

    # Its own thread

    def say(self, to: Sequence[int], kind: str, fields: Fields) -> None:
        """Tell those of `to` that are here."""
        if kind == "lost":
            self.lost.append((fields["rank"], fields["why"]))
            if self._on_loss is not None:
                self._on_loss(fields["rank"])
        if kind == "abort" and self.cause is None:
            self.cause = fields["error"]
            self.events.later(self._grace, self._vigil.kill)
        if kind == "begin":  # the ranks of one machine have one clock
            self._began = self._began or time.monotonic()
            fields = {"at": self._began}
        for rank in to:
            if rank in self._lines:
                self._lines[rank].send(kind, fields)

    def _run(self) -> None:
        try:
            while not self._is_over():
                self.events.turn()
        except Exception as error:  # its owner must hear of it, and no rank go on unwatched
            self._error = error
        finally:
            self._vigil.kill()
            self._close()
            self._done.set()

    def _is_over(self) -> bool:
        expected = self._watched if self.cause is not None else self._watched | self.ranks - set(self.seat.late)
        return self._all_started and self.endings.keys() >= expected and self._authority.over

    def _may_end(self) -> None:
        self._all_started = True
        if self.cause is not None:  # some may have been started after the others were killed
            self.events.later(self._grace, self._vigil.kill)

    def _finish(self) -> None:
        if self._finishing:
            self._hurry({"kind": "error", "text": "the run was told to stop twice: it stopped at once"})
            return
        self._finishing = True
        self._authority.finish()
        late = f"the run was told to stop, but came to no good moment for it within {PATIENCE:g} s"
        self.events.later(PATIENCE, partial(self._hurry, {"kind": "error", "text": late}))

    def _hurry(self, cause: Facts) -> None:
        self._grace = HASTE
        self._authority.abort(cause)
        self._vigil.kill(self._watched - self._lines.keys())  # they cannot hear of it

    def _count_down(self) -> None:
        self.events.later(self.seat.deadline, partial(self._authority.late, self.seat.deadline))

    def _close(self) -> None:
        self._door.close()
        self._authority.close()
        for line in self._speakers:
            line.close()
        self._vigil.close()
        self._memories.close()

    def _ended(self, rank: int, ending: Ending) -> None:
        """Its last words count, even if they are read after its death."""
        if rank in self._lines:
            self._read(self._lines[rank])
        self.endings[rank] = ending
        self._authority.gone(rank, str(ending), ending.code)

    # Lines

    def _admitted(self, line: Line) -> None:
        self._speakers[line] = None
        self.events.on(line, partial(self._read, line))

    def _read(self, line: Line) -> None:
        try:
            for kind, fields, _ in line.arrived():
                self._hear(line, kind, fields)
        except HungUp:
            self._forget(line)
        except Stranger as error:
            log.warning("a connection was turned away: %s", error)
            self._forget(line)

    def _forget(self, line: Line) -> None:
        rank = self._speakers.pop(line)
        if rank is not None:
            del self._lines[rank]
        self.events.off(line)
        line.close()

    def _hear(self, line: Line, kind: str, fields: Fields) -> None:
        rank = self._speakers[line]
        if rank is None:
            self._hello(line, kind, fields)
        elif kind == "memory":
            file, error = self._memories.ask(self.seat.hosts[rank], fields["name"], fields["nbytes"])
            line.send("memory", {"name": fields["name"], "error": error}, file=file)
        elif kind == "lines":
            if self._on_lines is not None:
                self._on_lines(fields["rows"])
        else:
            self._authority.heard(rank, kind, fields)

    def _hello(self, line: Line, kind: str, fields: Fields) -> None:
        rank = fields.get("rank")
        if kind != "hello" or rank not in self.ranks:
            raise Stranger(f"it begins with {kind!r} of rank {rank}, which is not a rank of this host")
        if rank in self._lines:
            raise Stranger(f"it says it is rank {rank}, who is here already")
        if self._patient and not self._lines:
            self._patient = False
            self._count_down()
        self._speakers[line], self._lines[rank] = rank, line
        if rank not in self._watched:
            self.watch(rank, fields["pid"])
        self._authority.heard(rank, kind, fields)


def _listen(name: str) -> socket.socket:
    """A socket with an abstract name: it is not a file, and vanishes with its owner."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0{name}")
    listener.listen(128)
    return listener
