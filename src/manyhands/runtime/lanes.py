"""Credit: how many messages of a lane (receiver and tag name) may be out, and how they come back.

A receiver need not say at once that it has released a message: as long as a lane has fewer messages out than its
credit, its sender cannot be waiting. So releases ride on the next message to that rank, and travel alone only when the
credit is used up.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple

from torch import Tensor

from manyhands.core.errors import MayNotWait
from manyhands.core.lending import Seal, inside_backward
from manyhands.core.protocols import Tag
from manyhands.runtime.wire import Acks

SPARE = 2
"""How many more messages a lane has out that replace unread ones: those come back by themselves."""


class Loan(NamedTuple):
    """What is out with a message: memory of ours that it lies in, and how it looked."""

    tag: Tag
    buffer: Tensor | None = None
    seals: tuple[Seal, ...] = ()


class Lanes:
    """The sending side: what is out."""

    def __init__(self, rank: int, check: Callable[[], None]) -> None:
        self._rank = rank
        self._check = check
        self._out: dict[tuple[int, str], dict[int, Loan | None]] = {}
        self._closed: set[int] = set()
        self._serial = 0
        self._news = threading.Condition(threading.Lock())

    def open(self, to: int, tag: Tag, *, latest: bool) -> int | None:
        """A serial number for one more message, as soon as there is credit; None if the receiver is gone."""
        most = tag.credit + SPARE if latest else tag.credit
        with self._news:
            out = self._out.setdefault((to, tag.name), {})
            while len(out) >= most and to not in self._closed:
                if inside_backward():
                    raise MayNotWait(f"rank {self._rank} may not wait inside a backward pass for credit to send {tag}")
                self._check()
                self._news.wait()
            self._check()
            if to in self._closed:
                return None
            self._serial += 1
            out[self._serial] = None
            return self._serial

    def lend(self, to: int, serial: int, loan: Loan) -> None:
        """Remember what went out."""
        with self._news:
            out = self._out[to, loan.tag.name]
            if serial in out:
                out[serial] = loan

    def lent(self, to: int, acks: Acks) -> list[Loan]:
        """What is out with these messages; each counts once, however often a peer names it."""
        with self._news:
            loans = [self._out.get((to, name), {}).get(serial) for name, serial in dict.fromkeys(acks)]
        return [loan for loan in loans if loan is not None]

    def come_back(self, to: int, acks: Acks) -> None:
        """Messages were released: there is credit again."""
        with self._news:
            for name, serial in acks:
                self._out.get((to, name), {}).pop(serial, None)
            self._news.notify_all()

    def close(self, to: int) -> None:
        """This rank is gone: nothing sent to it is waited for."""
        with self._news:
            self._closed.add(to)
            for (rank, _), out in self._out.items():
                if rank == to:
                    out.clear()
            self._news.notify_all()

    def reopen(self, to: int) -> None:
        """This rank has come."""
        with self._news:
            self._closed.discard(to)

    def wake(self) -> None:
        """Let everyone look again: the run is over."""
        with self._news:
            self._news.notify_all()

    def wait_until_back(self, seconds: float) -> None:
        """Wait until nothing is out, for a while."""
        with self._news:
            self._news.wait_for(lambda: not any(self._out.values()), seconds)


class Debts:
    """The receiving side: what was released and is still to be given back."""

    def __init__(self, *, at_once: bool) -> None:
        self._at_once = at_once
        self._unsaid: dict[int, list[tuple[str, int]]] = {}
        self._out: dict[tuple[int, str], int] = {}
        self._busy = threading.Lock()

    def arrived(self, frm: int, name: str, credit: int) -> Acks:
        """One more message is here; what must be given back now, because its sender may be waiting."""
        with self._busy:
            self._out[frm, name] = self._out.get((frm, name), 0) + 1
            return self._due(frm, name, credit)

    def released(self, frm: int, name: str, serial: int, credit: int) -> Acks:
        """A message was released; what must be given back now."""
        with self._busy:
            self._unsaid.setdefault(frm, []).append((name, serial))
            return self._due(frm, name, credit)

    def _due(self, frm: int, name: str, credit: int) -> Acks:
        unsaid = self._unsaid.get(frm)
        if not unsaid or not (self._at_once or self._out[frm, name] >= credit):
            return ()
        return self._say(frm, unsaid)

    def take(self, to: int) -> Acks:
        """What can ride on a message to this rank."""
        if not self._unsaid.get(to):
            return ()
        with self._busy:
            return self._say(to, self._unsaid[to])

    def _say(self, to: int, unsaid: Iterable[tuple[str, int]]) -> Acks:
        acks = tuple(unsaid)
        self._unsaid[to] = []
        for name, _ in acks:
            self._out[to, name] -= 1
        return acks
