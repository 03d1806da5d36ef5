"""The rendezvous store: entries that ranks exchange before they are connected, in torch's store at MASTER_ADDR."""

from __future__ import annotations

import json
import os
import socket
import time
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any

from manyhands.core.errors import ManyhandsError, Refused
from manyhands.runtime.membership.session import within

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]


END, JOINED, INFORMED = "end", "joined", "informed"
PAUSE = 0.02
"""Seconds between two reads of the store."""
LINGER = 2.0
"""Seconds in which all ranks must have read the error that ends the rendezvous."""


class RendezvousStore:
    """Entries by name. If a rank does not write its entry in time, every rank raises the same error, which names it.

    Args:
        owns: whether the store's server runs in this process and ends with it.
    """

    def __init__(self, store: Store, rank: int, size: int, deadline: float, *, owns: bool = False) -> None:
        self._store = store
        self._rank, self._size = rank, size
        self._deadline, self._owns = deadline, owns
        self._ends = time.monotonic() + deadline
        self._store.add(JOINED, 1)

    def put(self, name: str, entry: Any) -> None:
        """Write an entry."""
        self._store.set(name, json.dumps(entry))

    def get(self, name: str, frm: int) -> Any:
        """Wait for the entry of that name, which rank `frm` writes."""
        from torch.distributed import DistError

        try:
            while not self._store.check([name]):
                self._raise_end()
                if time.monotonic() > self._ends:
                    self.put(END, f"rank {frm} has not joined {within(self._deadline)}: its entry {name!r} is missing")
                else:
                    time.sleep(PAUSE)
            return json.loads(self._store.get(name))
        except DistError as error:
            raise ManyhandsError(f"rank {self._rank} has lost the rendezvous store: {_first_line(error)}") from None

    def _raise_end(self) -> None:
        """If one rank has given up, all do; the owner of the store waits until all joined ranks have read why."""
        if not self._store.check([END]):
            return
        ends, informed = time.monotonic() + LINGER, self._store.add(INFORMED, 1)
        while self._owns and informed < self._store.add(JOINED, 0) and time.monotonic() < ends:
            time.sleep(PAUSE)
            informed = self._store.add(INFORMED, 0)
        raise ManyhandsError(json.loads(self._store.get(END)))

    def gather(self, name: str, entry: Any) -> list[Any]:
        """The entries of that name of all ranks, in rank order."""
        self.put(f"{name}/{self._rank}", entry)
        return [self.get(f"{name}/{rank}", rank) for rank in range(self._size)]


def open_store(rank: int, size: int, address: str, port: int, deadline: float, session: int = 0) -> RendezvousStore:
    """The store of this session of the job: with torchrun its agent owns it, else rank 0 does."""
    from torch.distributed import DistError, PrefixStore, TCPStore  # type: ignore[attr-defined]

    owns = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    run = [os.environ.get(f"TORCHELASTIC_{name}", "") for name in ("RUN_ID", "RESTART_COUNT")]
    try:
        if owns:
            store = _own_store(address, port)
        else:
            store = TCPStore(address, port, None, False, timedelta(seconds=deadline), wait_for_workers=False)
        prefixed = PrefixStore("/".join(["manyhands", *run, str(session)]), store)
        return RendezvousStore(prefixed, rank, size, deadline, owns=owns)
    except DistError as error:
        raise ManyhandsError(
            f"rank {rank} cannot reach the rendezvous store at {address}:{port}: {_first_line(error)}"
        ) from None


@cache
def _own_store(address: str, port: int) -> Store:
    """A store that listens on this one address, where torch's default listens on all. It lives as long as the process,
    because a process group that the script makes later may share it."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    try:
        listener = socket.create_server((address, port), backlog=128)
    except OSError as error:
        raise Refused(f"rank 0 cannot listen at MASTER_ADDR {address}, MASTER_PORT {port}: {error.strerror}") from None
    return TCPStore(
        address,
        port,
        None,
        True,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
    )


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
