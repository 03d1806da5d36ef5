"""Roll: who of a job has come, begun, left, failed or been lost, and what the others must hear of it.

It has neither clock nor socket: whoever watches tells it what happened and says what it wants said.

Some ranks may come later. The job begins without them; who comes then hears who is there, and begins when it has
reached them.
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

    def __init__(self, size: int, say: Say, late: Sequence[int] = ()) -> None:
        self._size = size
        self._late = late
        self._say = say
        self._addresses: dict[int, Any] = {}
        self._reached: set[int] = set()
        self._begun = self._finishing = False
        self._granted: dict[str, int] = {}
        self._closed: set[str] = set()
        self._at: dict[int, int] = {}
        self._absent: list[int] = []
        self._done: dict[int, str] = {}
        """Left, failed or lost, and why: nothing they do matters any more."""
        self._coming: dict[str, set[int]] = {}
        self._arrivals: dict[str, list[int]] = {}
        """Who comes to a budget, and who has come."""
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
            case "enter":
                self._enter(rank, fields["name"], fields["number"])
            case "arrived":
                self._coming[fields["name"]].discard(rank)
            case "at":
                self._at[rank] = fields["step"]
                self._say_where_to_stop()
            case "left":
                self._done[rank] = "left"
                self._say_where_to_stop()
            case "failed":
                self._done[rank] = "it failed"
                self.abort(fields["error"])

    def gone(self, rank: int, why: str, code: int | None) -> None:
        """A rank's process has ended. A script may end well without ever joining, if nobody waits for it."""
        joined = rank in self._addresses
        if rank in self._done or self._cause is not None:
            self._done.setdefault(rank, why)
        elif not joined and rank in self._late:
            self._done[rank] = why
            log.warning("rank %d did not come: %s", rank, why)
        elif not joined and code == 0:
            self._absent.append(rank)
            self._miss_absent()
        elif not joined and code is not None and code > 0:
            self._done[rank] = why
            self.abort({"kind": "failed", "rank": rank, "text": f"it ended before it had joined (exit code {code})"})
        else:
            self._lose(rank, why)

    def late(self, deadline: float) -> None:
        """The time to come together is over."""
        missing = [rank for rank in self._founders if rank not in self._addresses]
        lonely = [rank for rank in self._founders if rank not in self._reached]
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
        elif rank in self._late:
            if self._begun:
                self._introduce([rank])
        elif all(one in self._addresses for one in self._founders):
            self._introduce(self._founders)
        self._miss_absent()

    def _introduce(self, ranks: Sequence[int]) -> None:
        addresses = sorted(self._addresses.items())
        self._say(ranks, "everyone", {"addresses": addresses, "gone": list(self._done.items())})

    def _has_reached(self, rank: int) -> None:
        self._reached.add(rank)
        if rank in self._late:
            self._begin([rank])
        elif not self._begun and all(one in self._reached for one in self._founders):
            self._begun = True
            self._begin(self._founders)
            for one in self._late:
                if one in self._addresses:
                    self._introduce([one])

    def _begin(self, ranks: Sequence[int]) -> None:
        self._say(ranks, "begin", {})
        if self._finishing:
            self._say(ranks, "finish", {})

    def _grant(self, rank: int, name: str, number: int) -> None:
        granted = self._granted.get(name, 0)
        if granted < number and self._finishing:
            self._closed.add(name)
        yes = granted < number and name not in self._closed
        self._granted[name] = granted + yes
        coming, arrivals = sorted(self._coming.get(name, ())), self._arrivals.get(name, [])
        answer = {"yes": yes, "closed": name in self._closed, "coming": coming, "arrivals": arrivals}
        self._say([rank], "granted", answer)

    def _enter(self, rank: int, name: str, number: int) -> None:
        taken, arrivals = self._granted.get(name, 0), self._arrivals.setdefault(name, [])
        over = taken >= number or self._finishing
        if taken and not over:
            arrivals.append(rank)
            self._coming.setdefault(name, set()).add(rank)
        self._say([rank], "entered", {"taken": taken, "over": over, "arrivals": arrivals})

    def _say_where_to_stop(self) -> None:
        """Once everyone has said how far it is: as far as the furthest go all."""
        present = self._present()
        if self._finishing and present and all(rank in self._at for rank in present):
            self._say(present, "stop", {"step": max(self._at.values())})

    def _miss_absent(self) -> None:
        if self._absent and self._addresses and self._cause is None:
            self._lose(self._absent[0], "it ended without joining")

    def _lose(self, rank: int, why: str) -> None:
        self._done[rank] = why
        for coming in self._coming.values():
            coming.discard(rank)
        log.warning("rank %d is lost: %s", rank, why)
        self._say_where_to_stop()
        self._say(self._present(), "lost", {"rank": rank, "why": why})
        if not self._begun:
            self.abort({"kind": "lost", "rank": rank, "why": why})

    @property
    def _founders(self) -> list[int]:
        return [rank for rank in range(self._size) if rank not in self._late]

    def _present(self) -> list[int]:
        """Whoever is there, or expected."""
        here = self._founders + [rank for rank in self._late if rank in self._reached]
        return [rank for rank in sorted(here) if rank not in self._done]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} have"
