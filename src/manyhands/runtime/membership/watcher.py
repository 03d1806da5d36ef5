"""Watcher: supervises the ranks of one host.

It authenticates them by the job's secret, hands out shared memory, and notices processes that end or are stopped. It
passes their messages to the authority over their session, and its answers back: to a `Membership` of its own, or to the
one of another host (`multi_host`).
"""

from __future__ import annotations

import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Sequence, Set
from functools import partial
from types import TracebackType
from typing import Any

from manyhands.runtime.membership.auth_listener import AuthListener
from manyhands.runtime.membership.control_channel import ChannelClosed, ControlChannel, Fields
from manyhands.runtime.membership.error_codec import Facts, pack
from manyhands.runtime.membership.event_loop import EventLoop
from manyhands.runtime.membership.membership import Membership
from manyhands.runtime.membership.process_monitor import Ending, ProcessMonitor
from manyhands.runtime.membership.secret import Stranger
from manyhands.runtime.membership.session import AGAIN, REJOIN, Authority, Session
from manyhands.runtime.rank_spec import RankSpec

log = logging.getLogger("manyhands")

GRACE = 1.0
"""Seconds after the end of a run in which ranks must exit by themselves; then they are killed."""
HASTE = 0.5
"""The same if the caller is waiting: after an interrupt, an error or a second stop."""
PATIENCE = 30.0
"""Seconds in which ranks that were asked to stop must do so."""
LOOP_PATIENCE = 9.0
"""The same for a user's own loop, unless it has reported that it knows of the stop: then it may save in peace."""
TICK = 0.2
"""Seconds after which a waiting owner looks for signals: one that another thread got does not end its wait."""
STOPPED = 128 + signal.SIGTERM
"""The exit code of a run that was asked to stop."""


class Watcher:
    """Watches until every rank has ended. As a context manager it leaves no rank behind.

    Args:
        spec: that of any rank of this host.
        ranks: the ranks of this host; all, if not given.
        authority: makes the object that decides; a `Membership`, if not given.
        until_left: stop watching a rank when it has left, whatever its process does then.
        own_loop: whether the ranks run a user's own loop.
        on_lines: takes the rows of the record that ranks send.
        on_loss: called with every lost rank.
    """

    def __init__(
        self,
        spec: RankSpec,
        ranks: Iterable[int] | None = None,
        *,
        authority: Callable[[Watcher], Authority] | None = None,
        until_left: bool = False,
        own_loop: bool = False,
        on_lines: Callable[[Any], None] | None = None,
        on_loss: Callable[[int], None] | None = None,
    ) -> None:
        self.spec = spec
        self.ranks = frozenset(range(spec.size) if ranks is None else ranks)
        self.lost: list[tuple[int, str]] = []
        self.endings: dict[int, Ending] = {}
        self.cause: Facts | None = None
        self._on_lines, self._on_loss = on_lines, on_loss
        self._sessions: dict[int, Session] = {}
        self._owner_of: dict[ControlChannel, tuple[Session, int] | None] = {}
        """The session and the rank of a channel; None until its hello."""
        self._watched: set[int] = set()
        self._grace, self._patient, self._all_started = GRACE, False, False
        self.finishing = self._is_known = False
        self._requests = 0
        self._patience = LOOP_PATIENCE if own_loop else PATIENCE
        self.has_begun = False
        """Whether all ranks were connected, so that they have begun."""
        self._error: Exception | None = None
        self.loop = EventLoop()
        self._listener = AuthListener(_listen(spec.watcher), spec.secret, self.loop, self._admitted)
        self._monitor = ProcessMonitor(lambda rank, ending: self.loop.post(partial(self._on_exit, rank, ending)))
        self._first = self._sessions[spec.session] = Session(self.ranks)
        self._released: Set[int] = self._first.left if until_left else frozenset()
        self._first.authority = authority(self) if authority else self._membership(self._first)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="manyhands-watcher", daemon=True)

    # For its owner

    def start(self, *, patient: bool = False) -> None:
        """Begin to watch. The deadline counts from now or, if `patient`, from the first hello."""
        self._patient = patient
        if not patient:
            self._start_deadline(self._first)
        self._thread.start()

    def watch(self, rank: int, pid: int, exit_code: Callable[[], int | None] = lambda: None) -> None:
        """Monitor this rank's process from now on; other ranks are monitored from their hello on."""
        self._watched.add(rank)
        self._monitor.watch(rank, pid, exit_code)

    def finish(self) -> None:
        """Ask all ranks to stop after their step; a second call stops them at once. Signal handlers may call it."""
        self.loop.post(self._finish)

    def finish_once(self) -> None:
        """Ask all ranks to stop after their step; a further call changes nothing. Signal handlers may call it."""
        self.loop.post(self._finish_once)

    def wait(self) -> None:
        """All ranks have been started: wait until they have ended."""
        self.loop.post(self._may_end)
        while not self._done.wait(TICK):
            pass  # signal handlers run here, in the main thread
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
        self.loop.close()

    def _stop(self, error: BaseException) -> None:
        """End the run if it has not ended; further interrupts do not interrupt this."""
        self.loop.post(partial(self._abort_now, pack(error, self.spec.rank)))
        self.loop.post(self._may_end)
        while not self._done.is_set():
            try:
                self._done.wait()
            except KeyboardInterrupt:  # the run is being stopped already
                continue

    # In its own thread

    def send(self, to: Sequence[int], kind: str, fields: Fields, session: Session | None = None) -> None:
        """Send a message to those of `to` that are connected, and take note of what it says."""
        session = session or self._first
        if kind == "lost":
            self.lost.append((fields["rank"], fields["why"]))
            if self._on_loss is not None:
                self._on_loss(fields["rank"])
        self.has_begun = self.has_begun or kind == "begin"
        if kind == "abort" and self.cause is None:
            self.cause = fields["error"]
            self.loop.later(self._grace, self._monitor.kill)
            for other in self._sessions.values():
                if other is not session:
                    other.authority.abort(fields["error"])
        session.send(to, kind, fields)

    def _run(self) -> None:
        try:
            while not self._is_over():
                self.loop.run_once()
        except Exception as error:  # `wait` raises it, and no rank may run unwatched
            self._error = error
        finally:
            self._monitor.kill(self._watched - self._released)
            self._close()
            self._done.set()

    def _is_over(self) -> bool:
        expected = (
            self._watched if self.cause is not None else self._watched | self.ranks - set(self.spec.pending_ranks)
        )
        done = all(session.authority.done for session in self._sessions.values())
        return self._all_started and done and (self.endings.keys() | self._released) >= expected

    def _may_end(self) -> None:
        self._all_started = True
        if self.cause is not None:  # some may have been started after the others were killed
            self.loop.later(self._grace, self._monitor.kill)

    def _finish(self) -> None:
        self._requests += 1
        if self._requests > 1:
            text = "the run was asked to stop twice: it stopped at once"
            self._abort_now({"kind": "error", "text": text, "code": STOPPED})
        else:
            self._finish_once()

    def _finish_once(self) -> None:
        if not self.finishing:
            self.finishing = True
            for session in self._sessions.values():
                session.authority.finish()
            self.loop.later(self._patience, self._abort_unless_known)

    def _abort_unless_known(self) -> None:
        if not self._is_known:
            text = f"the run was asked to stop, but has not stopped within {self._patience:g} s"
            self._abort_now({"kind": "error", "text": text, "code": STOPPED})

    def _abort_now(self, cause: Facts) -> None:
        self._grace = HASTE
        for session in self._sessions.values():
            session.authority.abort(cause)
        connected = [rank for session in self._sessions.values() for rank in session.channels]
        self._monitor.kill(self._watched.difference(connected))  # the message cannot reach them

    def _start_deadline(self, session: Session) -> None:
        deadline = self.spec.deadline if session is self._first else REJOIN
        self.loop.later(deadline, partial(session.authority.on_deadline, deadline))

    def _close(self) -> None:
        self._listener.close()
        for session in self._sessions.values():
            session.close()
        for channel in self._owner_of:
            channel.close()
        self._monitor.close()

    def _on_exit(self, rank: int, ending: Ending) -> None:
        """Messages that a rank sent before its end count, even if they are read after it."""
        for session in list(self._sessions.values()):
            if rank in session.channels:
                self._read(session.channels[rank])
        self.endings[rank] = ending
        for session in self._sessions.values():
            session.leave(rank)
            session.authority.on_exit(rank, str(ending), ending.code)

    # Sessions

    def _session(self, number: int) -> Session:
        """The session of this number; the next one begins with the first rank that joins again."""
        if number not in self._sessions:
            if number != self.spec.session + len(self._sessions):
                raise Stranger(f"it joins session {number}, but the next one is {len(self._sessions)}")
            session = self._sessions[number] = Session(self.ranks)
            session.authority = self._membership(session, AGAIN)
            self._start_deadline(session)
            for rank, ending in self.endings.items():
                session.authority.on_exit(rank, str(ending), ending.code)
            if self.cause is not None:
                session.authority.abort(self.cause)
            elif self.finishing:
                session.authority.finish()
        return self._sessions[number]

    def _membership(self, session: Session, *absent: str) -> Membership:
        return Membership(self.spec.size, partial(self.send, session=session), self.spec.pending_ranks, *absent)

    # Control channels

    def _admitted(self, sock: socket.socket, _: bytes) -> None:
        channel = ControlChannel(sock)
        self._owner_of[channel] = None
        self.loop.on_readable(channel, partial(self._read, channel))

    def _read(self, channel: ControlChannel) -> None:
        try:
            for kind, fields, _ in channel.received():
                self._on_message(channel, kind, fields)
        except ChannelClosed:
            self._close_channel(channel)
        except Stranger as error:
            log.warning("the watcher rejected a connection: %s", error)
            self._close_channel(channel)

    def _close_channel(self, channel: ControlChannel) -> None:
        owner = self._owner_of.pop(channel)
        if owner is not None:
            session, rank = owner
            del session.channels[rank]
        self.loop.remove(channel)
        channel.close()

    def _on_message(self, channel: ControlChannel, kind: str, fields: Fields) -> None:
        owner = self._owner_of[channel]
        if owner is None:
            self._on_hello(channel, kind, fields)
            return
        session, rank = owner
        if kind == "memory":
            file, error = session.memories.ask(self.spec.hosts[rank], fields["name"], fields["nbytes"])
            channel.send("memory", {"name": fields["name"], "error": error}, file=file)
        elif kind == "finish":
            self._finish_once()
        elif kind == "stopping":
            self._is_known = True
        elif kind == "lines":
            if self._on_lines is not None:
                self._on_lines(fields["rows"])
        else:
            if kind == "left":
                session.leave(rank)
            elif kind == "lost":  # nothing of it may arrive after the others know
                self._monitor.kill({rank})
            session.authority.on_message(rank, kind, fields)

    def _on_hello(self, channel: ControlChannel, kind: str, fields: Fields) -> None:
        rank = fields.get("rank")
        if kind != "hello" or rank not in self.ranks:
            raise Stranger(f"its first message is {kind!r} of rank {rank}, which is not a rank of this host")
        session = self._session(fields.get("session", self.spec.session))
        if rank in session.channels:
            raise Stranger(f"it claims to be rank {rank}, which is connected already")
        if self._patient:
            self._patient = False
            self._start_deadline(self._first)
        self._owner_of[channel], session.channels[rank] = (session, rank), channel
        if rank not in self._watched:
            self.watch(rank, fields["pid"])
        session.authority.on_message(rank, kind, fields)


def _listen(name: str) -> socket.socket:
    """A socket with an abstract name: it is not a file, and vanishes with its process."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0{name}")
    listener.listen(128)
    return listener
