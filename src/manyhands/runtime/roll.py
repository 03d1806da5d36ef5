"""Roll: who of a job has come, begun, left, failed or been lost, and what the others must hear of it.

It has neither clock nor socket: whoever watches tells it what happened and says what it wants said.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from manyhands.runtime.control import Fields
from manyhands.runtime.failures import Facts

log = logging.getLogger("manyhands")

Say = Callable[[Sequence[int], str, Fields], None]
"""Say something to some ranks; those that are not there do not hear it."""


class Roll:
    """The authority over one job. The first thing that ends the run is its cause, whatever follows from it."""

    def __init__(self, size: int, say: Say) -> None:
        self._size = size
        self._say = say
        self._addresses: dict[int, Any] = {}
        self._reached: set[int] = set()
        self._begun = self._finishing = False
        self._granted: dict[str, int] = {}
        self._closed: set[str] = set()
        self._at: dict[int, int] = {}
        self._absent: list[int] = []
        self._done: set[int] = set()
        """Left, failed or lost: nothing they do matters any more."""
        self._cause: Facts | None = None

    @property
    def over(self) -> bool:
        """No other host needs us: there is none."""
        return True

    def heard(self, rank: int, kind: str, fields: Fields) -> None:
        """A rank has said something."""
        if rank in self._done:
            return
        match kind:
            case "hello":
                self._hello(rank, fields["address"])
            case "reached":
                self._has_reached(rank)
            case "grant":
                self._grant(rank, fields.get("name", ""), fields["number"])
            case "at":
                self._at[rank] = fields["step"]
                self._say_where_to_stop()
            case "left":
                self._done.add(rank)
                self._say_where_to_stop()
            case "failed":
                self._done.add(rank)
                self.abort(fields["error"])

    def gone(self, rank: int, why: str, code: int | None) -> None:
        """A rank's process has ended. A script may end well without ever joining, if nobody waits for it."""
        joined = rank in self._addresses
        if rank in self._done or self._cause is not None:
            self._done.add(rank)
        elif not joined and code == 0:
            self._absent.append(rank)
            self._miss_absent()
        elif not joined and code is not None and code > 0:
            self._done.add(rank)
            self.abort({"kind": "failed", "rank": rank, "text": f"it ended before it had joined (exit code {code})"})
        else:
            self._lose(rank, why)

    def late(self, deadline: float) -> None:
        """The time to come together is over."""
        missing = [rank for rank in range(self._size) if rank not in self._addresses]
        lonely = [rank for rank in range(self._size) if rank not in self._reached]
        if not self._begun:
            what = f"come within {deadline:g} s" if missing else f"reached all others within {deadline:g} s"
            self.abort({"kind": "error", "text": f"{_ranks(missing or lonely)} not {what}"})

    def finish(self) -> None:
        """Everyone stops at the next good moment; who has not begun yet hears it then."""
        self._finishing = True
        self._say(self._present(), "finish", {})

    def abort(self, cause: Facts) -> None:
        """The run is over."""
        if self._cause is None:
            self._cause = cause
            self._say(self._present(), "abort", {"error": cause})

    def close(self) -> None:
        """There is nothing to close."""

    def _hello(self, rank: int, address: Any) -> None:
        self._addresses[rank] = address
        if self._cause is not None:
            self._say([rank], "abort", {"error": self._cause})
        elif len(self._addresses) == self._size:
            everyone = [address for _, address in sorted(self._addresses.items())]
            self._say(self._present(), "everyone", {"addresses": everyone})
        self._miss_absent()

    def _has_reached(self, rank: int) -> None:
        self._reached.add(rank)
        if len(self._reached) == self._size and not self._begun:
            self._begun = True
            self._say(self._present(), "begin", {})
            if self._finishing:
                self.finish()

    def _grant(self, rank: int, name: str, number: int) -> None:
        granted = self._granted.get(name, 0)
        if granted < number and self._finishing:
            self._closed.add(name)
        yes = granted < number and name not in self._closed
        self._granted[name] = granted + yes
        self._say([rank], "granted", {"yes": yes, "closed": name in self._closed})

    def _say_where_to_stop(self) -> None:
        """Once everyone has said how far it is: as far as the furthest go all."""
        present = self._present()
        if self._finishing and present and all(rank in self._at for rank in present):
            self._say(present, "stop", {"step": max(self._at.values())})

    def _miss_absent(self) -> None:
        if self._absent and self._addresses and self._cause is None:
            self._lose(self._absent[0], "it ended without joining")

    def _lose(self, rank: int, why: str) -> None:
        self._done.add(rank)
        log.warning("rank %d is lost: %s", rank, why)
        self._say_where_to_stop()
        self._say(self._present(), "lost", {"rank": rank, "why": why})
        if not self._begun:
            self.abort({"kind": "lost", "rank": rank, "why": why})

    def _present(self) -> list[int]:
        return [rank for rank in range(self._size) if rank not in self._done]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} have"
