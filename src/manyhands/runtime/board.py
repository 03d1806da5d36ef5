"""Board: where ranks that have not met yet leave notes for each other, in torch's store at MASTER_ADDR."""

from __future__ import annotations

import json
import os
import socket
import time
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any

from manyhands.core.errors import ManyhandsError, Refused

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]


END, COME, HEARD = "end", "come", "heard"
PAUSE = 0.02
"""Seconds between two looks at the board."""
LINGER = 2.0
"""Seconds in which everyone must have read why nobody waits any longer."""


class Board:
    """Notes by name. Whoever does not write in time is named, with the same words on every rank.

    Args:
        keeps: whether the store ends with this rank.
    """

    def __init__(self, store: Store, rank: int, size: int, deadline: float, *, keeps: bool = False) -> None:
        self._store = store
        self._rank, self._size = rank, size
        self._deadline, self._keeps = deadline, keeps
        self._ends = time.monotonic() + deadline
        self._store.add(COME, 1)

    def put(self, name: str, note: Any) -> None:
        self._store.set(name, json.dumps(note))

    def get(self, name: str, frm: int) -> Any:
        """The note of that name, which rank `frm` writes."""
        from torch.distributed import DistError

        try:
            while not self._store.check([name]):
                self._stop_at_end()
                if time.monotonic() > self._ends:
                    self.put(END, f"rank {frm} has not come within {self._deadline:g} s (its {name!r} is missing)")
                else:
                    time.sleep(PAUSE)
            return json.loads(self._store.get(name))
        except DistError as error:
            raise ManyhandsError(f"rank {self._rank} has lost the store: {_first_line(error)}") from None

    def _stop_at_end(self) -> None:
        """If somebody waits no longer, nobody does; the store is kept until all who have come know it."""
        if not self._store.check([END]):
            return
        ends, heard = time.monotonic() + LINGER, self._store.add(HEARD, 1)
        while self._keeps and heard < self._store.add(COME, 0) and time.monotonic() < ends:
            time.sleep(PAUSE)
            heard = self._store.add(HEARD, 0)
        raise ManyhandsError(json.loads(self._store.get(END)))

    def gather(self, name: str, note: Any) -> list[Any]:
        """Everyone's note of that name, by rank."""
        self.put(f"{name}/{self._rank}", note)
        return [self.get(f"{name}/{rank}", rank) for rank in range(self._size)]


def open_board(rank: int, size: int, address: str, port: int, deadline: float) -> Board:
    """The board of this job: with torchrun its agent keeps the store, else rank 0 does."""
    from torch.distributed import DistError, PrefixStore, TCPStore  # type: ignore[attr-defined]

    keeps = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    run = [os.environ.get(f"TORCHELASTIC_{name}", "") for name in ("RUN_ID", "RESTART_COUNT")]
    try:
        if keeps:
            store = _own_store(address, port)
        else:
            store = TCPStore(address, port, None, False, timedelta(seconds=deadline), wait_for_workers=False)
        return Board(PrefixStore("/".join(["manyhands", *run]), store), rank, size, deadline, keeps=keeps)
    except DistError as error:
        raise ManyhandsError(f"rank {rank} cannot reach the store at {address}:{port}: {_first_line(error)}") from None


@cache
def _own_store(address: str, port: int) -> Store:
    """Bound to this one address, where torch's own would listen on all. It lives as long as the process, because a
    process group that the script makes later may share it."""
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
