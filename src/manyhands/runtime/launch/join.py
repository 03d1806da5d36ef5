"""Joining: how a process becomes a rank. It reports its address, connects to all other ranks, and begins with them.

A pending rank connects to the ranks that are present, and begins at once. If it fails to, the others continue without
it.
"""

from __future__ import annotations

import atexit
import gc
import socket
import threading
import time
from dataclasses import replace

from manyhands.core.errors import ManyhandsError, Refused
from manyhands.runtime.launch.allocator import keep_freed_memory
from manyhands.runtime.membership.auth_listener import AuthListener
from manyhands.runtime.membership.secret import Stranger, introduce
from manyhands.runtime.membership.session import REJOIN
from manyhands.runtime.rank_spec import RankSpec, from_environment
from manyhands.runtime.transport.transport import RealTransport


class TooLate(ManyhandsError):
    """A pending rank found no run to join."""


def connect(spec: RankSpec | None = None, servers: int | None = None) -> RealTransport:
    """Join as the rank of `spec`, else of our launcher, else of torchrun; returns when all ranks are connected.

    Without a launcher the process is the only rank.
    A process can join again when it has left; all ranks must do so equally often.
    """
    if spec is None:
        return _connect_again(servers)
    keep_freed_memory()
    transport = RealTransport(spec)
    atexit.register(transport.close)
    try:
        transport.begin(_connect_all(spec, transport))
    except ManyhandsError as error:
        if spec.rank in spec.pending_ranks:
            transport.leave()
            raise TooLate(f"rank {spec.rank} cannot join the run any more: {error}") from None
        transport.fail(error)
        raise
    return transport


def _connect_again(servers: int | None) -> RealTransport:
    """Join as the rank that the environment describes, for the first time or again: after all have left, it can."""
    former = _joined[-1] if _joined else None
    if former is not None:
        _refuse_unended(former)
    transport = connect(_spec_of_environment(servers, 0 if former is None else former.spec.session + 1))
    _joined[:] = [transport]
    if former is not None:  # all others have left it too, else they could not have joined again
        atexit.unregister(former.close)
        former.close()
        gc.collect()  # objects that refer to each other may hold shared memory of earlier sessions
    return transport


_joined: list[RealTransport] = []
"""The last join of this process: one object, or none."""


def _refuse_unended(former: RealTransport) -> None:
    if not former.has_left:
        former.check()
        raise Refused(
            f"rank {former.rank} joins again, but its former hands have not ended: "
            "leave their with block first, or call hands.end()"
        )


def _spec_of_environment(servers: int | None, session: int) -> RankSpec:
    spec = from_environment()
    if spec is None:
        from manyhands.runtime.launch.rendezvous import rank_spec_from_torchrun, rank_spec_without_launcher

        alone = rank_spec_without_launcher(servers or 0, session)
        return alone or rank_spec_from_torchrun(servers or 0, session=session)
    if servers is not None and servers != spec.roles.count("server"):
        raise Refused(f"servers is {servers}, but this run was started with {spec.roles.count('server')}")
    return replace(spec, session=session, deadline=REJOIN) if session else spec


def _connect_all(spec: RankSpec, transport: RealTransport) -> float:
    """Connect to all ranks that are present; returns when the job began, by this machine's clock."""
    for rank in spec.pending_ranks:
        if rank != spec.rank:
            transport.mark_absent(rank, "it has not joined yet")
    incoming = IncomingPeers(spec, transport)
    addresses, gone = transport.control.hello(incoming.address)
    for rank, why in gone.items():
        transport.mark_absent(rank, why)
    for rank in _outgoing(spec):
        if rank in addresses and rank not in gone:
            transport.attach(rank, _connect(spec, rank, addresses[rank]))
    incoming.wait_for_all(spec.deadline)
    return transport.control.connected()


def _outgoing(spec: RankSpec) -> list[int]:
    """The ranks that this one connects to: the initial ones below it, or all others if it joins later."""
    if spec.rank in spec.pending_ranks:
        return [rank for rank in range(spec.size) if rank != spec.rank]
    return [rank for rank in range(spec.rank) if rank not in spec.pending_ranks]


def _is_near(spec: RankSpec, rank: int) -> bool:
    """Whether a rank is reached without the network."""
    return spec.link == "shm" and spec.hosts[rank] == spec.host


def _connect(spec: RankSpec, rank: int, address: str) -> socket.socket:
    """An authenticated socket to another rank."""
    try:
        if _is_near(spec, rank):
            sock = socket.socket(socket.AF_UNIX)
            sock.connect(f"\0{spec.listener(rank)}")
        else:
            host, _, port = address.rpartition(":")
            sock = socket.create_connection((host, int(port)), timeout=max(1.0, min(10.0, spec.deadline)))
            sock.settimeout(None)
        introduce(sock, spec.secret, str(spec.rank).encode())
    except (OSError, Stranger) as error:
        where = "on this host" if _is_near(spec, rank) else f"at {address}"
        raise Refused(f"rank {spec.rank} cannot reach rank {rank} {where}: {error}") from None
    return sock


class IncomingPeers:
    """Attaches the ranks that connect to this one: those above it, and pending ranks whenever they join."""

    def __init__(self, spec: RankSpec, transport: RealTransport) -> None:
        self._spec = spec
        self._transport = transport
        self._pending = set(spec.pending_ranks) - {spec.rank}
        self._missing: set[int] = set()
        if spec.rank not in spec.pending_ranks:
            self._missing = set(range(spec.rank + 1, spec.size)) - self._pending
        self._changed = threading.Condition()
        self.address = ""
        others = [rank for rank in range(spec.size) if rank != spec.rank]
        if any(_is_near(spec, rank) for rank in others):
            near = socket.socket(socket.AF_UNIX)
            near.bind(f"\0{spec.listener(spec.rank)}")
            self._listen(near)
        if not all(_is_near(spec, rank) for rank in others):
            far = socket.create_server((spec.bind, 0))
            self.address = f"{spec.bind}:{far.getsockname()[1]}"
            self._listen(far)

    def _listen(self, sock: socket.socket) -> None:
        sock.listen(max(16, self._spec.size))
        reader, owner = self._transport.reader, f"rank {self._spec.rank}"
        listener = AuthListener(sock, self._spec.secret, reader, self._admitted, owner)
        self._transport.resources.closes(listener.close)

    def _admitted(self, sock: socket.socket, introduction: bytes) -> None:
        if not introduction.isdigit() or int(introduction) not in self._missing | self._pending:
            raise Stranger(f"it claims to be rank {introduction.decode(errors='replace')!r:.20}, which is not expected")
        rank = int(introduction)
        self._transport.attach(rank, sock)
        with self._changed:
            self._missing.discard(rank)
            self._pending.discard(rank)
            self._changed.notify_all()

    def wait_for_all(self, seconds: float) -> None:
        """Wait until all initial ranks above this one have connected."""
        ends = time.monotonic() + seconds
        with self._changed:
            while self._missing:
                self._transport.check()
                if time.monotonic() > ends:
                    raise Refused(
                        f"rank {min(self._missing)} has not connected to rank {self._spec.rank} within {seconds:.0f} s"
                    )
                self._changed.wait(0.1)
