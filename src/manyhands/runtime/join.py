"""Joining: how a process becomes a rank. It says hello, reaches everyone, and begins with all others.

Who comes later reaches whoever is there, and begins at once. If it does not get that far, the others go on without it.
"""

from __future__ import annotations

import atexit
import logging
import socket
import threading
import time
from collections.abc import Callable

from manyhands.core.errors import ManyhandsError, Refused
from manyhands.runtime.seat import Seat, from_environment
from manyhands.runtime.secret import Stranger, admit, introduce
from manyhands.runtime.transport import RealTransport

log = logging.getLogger("manyhands")
AT_ONCE = 64
"""Callers at the door whose proof is still awaited."""


def connect(seat: Seat | None = None, servers: int | None = None) -> RealTransport:
    """Take a seat and meet all others: the seat given, that of our launcher, or that of torchrun and its like."""
    if seat is None:
        _refuse_second()
        seat = from_environment()
    if seat is None:
        from manyhands.runtime.rendezvous import seat_from_torchrun

        seat = seat_from_torchrun(servers or 0)
    elif servers is not None and servers != seat.roles.count("server"):
        raise Refused(f"servers is {servers}, but this run was started with {seat.roles.count('server')}")
    transport = RealTransport(seat)
    atexit.register(transport.close)
    try:
        transport.begin(_meet(seat, transport))
    except ManyhandsError as error:
        if seat.rank in seat.late:
            transport.leave()
            raise TooLate(f"rank {seat.rank} has come too late: {error}") from None
        transport.fail(error)
        raise
    return transport


class TooLate(ManyhandsError):
    """There is nobody left to join."""


def _refuse_second() -> None:
    """The seat that a process was started for can be taken once."""
    if _seated:
        raise Refused("this process has joined its run already, but can join only once: share again within one block")
    _seated.append(True)


_seated: list[bool] = []


def _meet(seat: Seat, transport: RealTransport) -> float:
    """Reach everyone; says when the job began, by this machine's clock."""
    for rank in seat.late:
        if rank != seat.rank:
            transport.miss(rank, "it has not come yet")
    door = Door(seat, transport)
    addresses, gone = transport.member.hello(door.address)
    for rank, why in gone.items():
        transport.miss(rank, why)
    for rank in _reaches(seat):
        if rank in addresses and rank not in gone:
            transport.attach(rank, _reach(seat, rank, addresses[rank]))
    door.wait_for_all(seat.deadline, transport)
    return transport.member.reached()


def _reaches(seat: Seat) -> list[int]:
    """Whom a rank calls: those before it that begin with it, or everyone if it comes later."""
    if seat.rank in seat.late:
        return [rank for rank in range(seat.size) if rank != seat.rank]
    return [rank for rank in range(seat.rank) if rank not in seat.late]


def is_near(seat: Seat, rank: int) -> bool:
    """Whether a rank is reached without the network."""
    return seat.link == "shm" and seat.hosts[rank] == seat.host


def _reach(seat: Seat, rank: int, address: str) -> socket.socket:
    """A socket to another rank, both having proved themselves."""
    ends = time.monotonic() + seat.deadline
    try:
        if is_near(seat, rank):
            sock = socket.socket(socket.AF_UNIX)
            sock.connect(f"\0{seat.door(rank)}")
        else:
            host, _, port = address.rpartition(":")
            sock = socket.create_connection((host, int(port)), timeout=max(1.0, min(10.0, ends - time.monotonic())))
            sock.settimeout(None)
        introduce(sock, seat.secret, str(seat.rank).encode())
    except (OSError, Stranger) as error:
        place = "on this host" if is_near(seat, rank) else f"at {address}"
        raise Refused(f"rank {seat.rank} cannot reach rank {rank} {place}: {error}") from None
    return sock


class Door:
    """Where ranks with higher numbers connect, and strangers are turned away."""

    def __init__(self, seat: Seat, transport: RealTransport) -> None:
        self._seat = seat
        self._transport = transport
        self._callers = threading.Semaphore(AT_ONCE)
        self._may_come = set(seat.late) - {seat.rank}
        self._missing: set[int] = set()
        if seat.rank not in seat.late:
            self._missing = set(range(seat.rank + 1, seat.size)) - self._may_come
        self._news = threading.Condition()
        self.address = ""
        others = [rank for rank in range(seat.size) if rank != seat.rank]
        if any(is_near(seat, rank) for rank in others):
            near = socket.socket(socket.AF_UNIX)
            near.bind(f"\0{seat.door(seat.rank)}")
            self._open(near)
        if not all(is_near(seat, rank) for rank in others):
            far = socket.create_server((seat.bind, 0), backlog=max(16, seat.size))
            self.address = f"{seat.bind}:{far.getsockname()[1]}"
            self._open(far)

    def _open(self, listener: socket.socket) -> None:
        listener.listen(max(16, self._seat.size))
        listener.setblocking(False)
        self._transport.reader.watch(listener, self._answer(listener))

    def _answer(self, listener: socket.socket) -> Callable[[], bool]:
        def answer() -> bool:
            try:
                sock, _ = listener.accept()
            except OSError:
                return True
            sock.setblocking(True)
            if self._callers.acquire(blocking=False):
                threading.Thread(target=self._admit, args=(sock,), daemon=True).start()
            else:
                log.warning("a connection was turned away: %d others are still to prove themselves", AT_ONCE)
                sock.close()
            return True

        return answer

    def _admit(self, sock: socket.socket) -> None:
        try:
            rank = int(admit(sock, self._seat.secret))
            with self._news:
                if rank not in self._missing | self._may_come:
                    raise Stranger(f"it says it is rank {rank}, which is not awaited")
                self._transport.attach(rank, sock)
                self._missing.discard(rank)
                self._may_come.discard(rank)
                self._news.notify_all()
        except (Stranger, ValueError, OSError) as error:
            log.warning("rank %d turned a connection away: %s", self._seat.rank, error)
            sock.close()
        finally:
            self._callers.release()

    def wait_for_all(self, seconds: float, transport: RealTransport) -> None:
        """Wait for everyone with a higher number."""
        ends = time.monotonic() + seconds
        with self._news:
            while self._missing:
                transport.check()
                if time.monotonic() > ends:
                    raise Refused(
                        f"rank {min(self._missing)} has not reached rank {self._seat.rank} in {seconds:.0f} s"
                    )
                self._news.wait(0.1)
