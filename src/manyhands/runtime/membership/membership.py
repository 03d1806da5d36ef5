"""Membership: which ranks of a job have joined, begun, left, failed or been lost, and what the others must know of it.

It has neither a clock nor sockets: a watcher reports events to it and sends the messages it asks for.

Pending ranks join later. The job begins without them; a rank that joins a running job receives the addresses of the
present ranks, and begins as soon as it is connected to them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from manyhands.runtime.membership.control_channel import Fields
from manyhands.runtime.membership.error_codec import Facts
from manyhands.runtime.membership.session import within

log = logging.getLogger("manyhands")

Send = Callable[[Sequence[int], str, Fields], None]
"""Send a message to some ranks; those that are not connected do not get it."""


class Membership:
    """The authority over one job. The first event that ends the run is its cause, whatever follows from it.

    Args:
        size: how many ranks there are.
        send: how messages reach them.
        pending_ranks: those that join later, or never.
        absent: why a rank is lost that the others wait for and that has ended.
    """

    def __init__(
        self, size: int, send: Send, pending_ranks: Sequence[int] = (), absent: str = "it ended without joining"
    ) -> None:
        self._absent = absent
        self._pending = pending_ranks
        self._initial = [rank for rank in range(size) if rank not in pending_ranks]
        self._send = send
        self._addresses: dict[int, Any] = {}
        self._connected: set[int] = set()
        self._begun = self._finishing = False
        self._granted: dict[str, int] = {}
        self._closed: set[str] = set()
        self._progress: dict[int, int] = {}
        self._never_joined: list[int] = []
        self._ended: dict[int, str] = {}
        """Ranks that left, failed or were lost, and why: further messages from them are ignored."""
        self._joining: dict[str, set[int]] = {}
        self._arrivals: dict[str, list[int]] = {}
        """By budget: the ranks that are joining it, and those that have begun to."""
        self._cause: Facts | None = None

    @property
    def done(self) -> bool:
        """No watcher of another host needs this one: there is no other host."""
        return True

    def on_message(self, rank: int, kind: str, fields: Fields) -> None:
        """Handle a message of a rank; see `control_channel` for the kinds."""
        if rank in self._ended:
            return
        match kind:
            case "hello":
                self._on_hello(rank, fields["address"])
            case "connected":
                self._on_connected(rank)
            case "grant":
                self._grant(rank, fields.get("name", ""), fields["number"], fields.get("closes", True))
            case "enter":
                self._enter(rank, fields["name"], fields["number"])
            case "arrived":
                self._joining[fields["name"]].discard(rank)
            case "progress":
                self._progress[rank] = fields["step"]
                self._send_stop()
            case "left":
                self._ended[rank] = "left"
                self._send_stop()
            case "lost":
                self._lose(rank, fields["why"])
            case "failed":
                self._ended[rank] = "it failed"
                self.abort(fields["error"])

    def on_exit(self, rank: int, why: str, code: int | None) -> None:
        """A rank's process has ended. A script that never joins may exit with 0, unless another rank waits for it."""
        joined = rank in self._addresses
        if rank in self._ended or self._cause is not None:
            self._ended.setdefault(rank, why)
        elif not joined and rank in self._pending:
            self._ended[rank] = why
            log.warning("rank %d did not join: %s", rank, why)
        elif not joined and code == 0:
            self._never_joined.append(rank)
            self._lose_never_joined()
        elif not joined and code is not None and code > 0:
            self._ended[rank] = why
            self.abort({"kind": "failed", "rank": rank, "text": f"it ended before it had joined (exit code {code})"})
        else:
            self._lose(rank, why)

    def on_deadline(self, deadline: float) -> None:
        """The time in which all initial ranks must be connected has passed."""
        if self._begun:
            return
        missing = [rank for rank in self._initial if rank not in self._addresses]
        unconnected = [rank for rank in self._initial if rank not in self._connected]
        what = "joined" if missing else "connected to all others"
        self.abort({"kind": "error", "text": f"{_ranks(missing or unconnected)} not {what} {within(deadline)}"})

    def finish(self) -> None:
        """Ask all ranks to stop after their current step; ranks that have not begun are asked when they do."""
        self._finishing = True
        self._send(self._present(), "finish", {})

    def abort(self, cause: Facts) -> None:
        """End the run of all ranks because of `cause`."""
        if self._cause is None:
            self._cause = cause
            self._send(self._present(), "abort", {"error": cause})

    def close(self) -> None:
        """Nothing to close here; a `Hub` closes its links."""

    def _on_hello(self, rank: int, address: Any) -> None:
        self._addresses[rank] = address
        if self._cause is not None:
            self._send([rank], "abort", {"error": self._cause})
        elif rank in self._pending:
            if self._begun:
                self._send_addresses([rank])
        elif all(one in self._addresses for one in self._initial):
            self._send_addresses(self._initial)
        self._lose_never_joined()

    def _send_addresses(self, ranks: Sequence[int]) -> None:
        addresses = sorted(self._addresses.items())
        self._send(ranks, "addresses", {"addresses": addresses, "gone": list(self._ended.items())})

    def _on_connected(self, rank: int) -> None:
        self._connected.add(rank)
        if rank in self._pending:
            self._begin([rank])
        elif not self._begun and all(one in self._connected for one in self._initial):
            self._begun = True
            self._begin(self._initial)
            for one in self._pending:
                if one in self._addresses:
                    self._send_addresses([one])

    def _begin(self, ranks: Sequence[int]) -> None:
        self._send(ranks, "begin", {})
        if self._finishing:
            self._send(ranks, "finish", {})

    def _grant(self, rank: int, name: str, number: int, closes: bool) -> None:
        granted = self._granted.get(name, 0)
        if granted < number and self._finishing and closes:
            self._closed.add(name)
        yes = granted < number and name not in self._closed
        self._granted[name] = granted + yes
        joining, arrivals = sorted(self._joining.get(name, ())), self._arrivals.get(name, [])
        answer = {"yes": yes, "closed": name in self._closed, "joining": joining, "arrivals": arrivals}
        self._send([rank], "granted", answer)

    def _enter(self, rank: int, name: str, number: int) -> None:
        taken, arrivals = self._granted.get(name, 0), self._arrivals.setdefault(name, [])
        over = taken >= number or self._finishing
        if taken and not over:
            arrivals.append(rank)
            self._joining.setdefault(name, set()).add(rank)
        self._send([rank], "entered", {"taken": taken, "over": over, "arrivals": arrivals})

    def _send_stop(self) -> None:
        """Once every rank has reported its step, all of them stop at the largest one."""
        present = self._present()
        if self._finishing and present and all(rank in self._progress for rank in present):
            self._send(present, "stop", {"step": max(self._progress.values())})

    def _lose_never_joined(self) -> None:
        if self._never_joined and self._addresses and self._cause is None:
            self._lose(self._never_joined[0], self._absent)

    def _lose(self, rank: int, why: str) -> None:
        self._ended[rank] = why
        for joining in self._joining.values():
            joining.discard(rank)
        log.warning("rank %d is lost: %s", rank, why)
        self._send_stop()
        self._send(self._present(), "lost", {"rank": rank, "why": why})
        if not self._begun:
            self.abort({"kind": "lost", "rank": rank, "why": why})

    def _present(self) -> list[int]:
        """The initial ranks, and the pending ones that have joined, without those that have ended."""
        ranks = self._initial + [rank for rank in self._pending if rank in self._connected]
        return [rank for rank in sorted(ranks) if rank not in self._ended]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} have"
