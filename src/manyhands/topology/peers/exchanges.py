"""Exchanges: how a peer's x meets another's. Each is one side of a conversation, one message at a time.

    Pulling   x_i <- (x_i + x_j) / 2              i asks, j tells; j is not changed
    Pushing   x_j <- (x_j + sum x_i) / (1 + n)    i sends and goes on; j averages what n others sent when it steps
    Pairing   x_i, x_j <- (x_i + x_j) / 2         i offers, j takes it, both change: the mean of all x is kept

A pairing is atomic: while its own is open a peer refuses others, who then try the next one; when two offers to each
other cross, each takes the other's for the answer. So nobody waits in a circle. A push waits for nobody: if its
receiver has not read the last one of the same sender, the newer takes its place.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from manyhands.core.protocols import Message, Tag
from manyhands.topology.peers.own import Own

OFFER, TAKEN, REFUSED = Tag("offer", credit=8), Tag("taken", credit=8), Tag("refused", credit=8)
ASK, TOLD, PUSHED = Tag("ask", carries="nothing"), Tag("told"), Tag("pushed")


class Exchange(Protocol):
    """One peer's side of all conversations. Each call says whether our own exchange is over now."""

    tags: tuple[Tag, ...]

    def begin(self, peers: Iterator[int]) -> bool:
        """It is time for one: with the first of these peers that can be had, or with nobody."""

    def hear(self, message: Message) -> bool:
        """A message has come, to ask for something or in answer to us."""

    def forget(self, rank: int) -> bool:
        """A peer is lost: it will not answer."""


class Pairing:
    """Both ends change."""

    def __init__(self, own: Own) -> None:
        self.own = own
        self.tags: tuple[Tag, ...] = (OFFER, TAKEN, REFUSED)
        self.open: int | None = None
        self.untried: Iterator[int] = iter(())
        self.lost: set[int] = set()

    def begin(self, peers: Iterator[int]) -> bool:
        self.untried = peers
        return self.try_next()

    def try_next(self) -> bool:
        """Offer x to the next peer; if all refuse, go on without averaging."""
        self.open = next((rank for rank in self.untried if rank not in self.lost), None)
        if self.open is not None:
            self.own.send(self.open, OFFER)
        return self.open is None

    def hear(self, message: Message) -> bool:
        if message.tag == OFFER and message.frm != self.open:
            self.consider(message)
            return False
        if message.frm != self.open:  # the late word of a lost peer
            message.release()
            return False
        if message.tag == REFUSED:
            return self.try_next()
        self.open = None
        self.own.average(self.own.heard(message.tensors))
        message.release()
        return True

    def consider(self, offer: Message) -> None:
        """A peer offers its weights: average with it, unless an exchange of our own is open."""
        if self.open is None:
            self.own.send(offer.frm, TAKEN)
            self.own.average(self.own.heard(offer.tensors))
        else:
            self.own.w.transport.send(offer.frm, REFUSED)
        offer.release()

    def forget(self, rank: int) -> bool:
        self.lost.add(rank)
        return self.open == rank and self.try_next()


class Pulling:
    """Only the end that asks changes."""

    def __init__(self, own: Own) -> None:
        self.own = own
        self.tags: tuple[Tag, ...] = (ASK, TOLD)
        self.open: int | None = None
        self.untried: Iterator[int] = iter(())
        self.lost: set[int] = set()

    def begin(self, peers: Iterator[int]) -> bool:
        self.untried = peers
        return self.ask_next()

    def ask_next(self) -> bool:
        """Ask a peer for its x; the next one if it is lost."""
        self.open = next((rank for rank in self.untried if rank not in self.lost), None)
        if self.open is not None:
            self.own.w.transport.send(self.open, ASK)
        return self.open is None

    def hear(self, message: Message) -> bool:
        if message.tag == ASK:
            self.own.send(message.frm, TOLD)
            return False
        answered = message.frm == self.open  # if not, it is the late word of a lost peer
        if answered:
            self.open = None
            self.own.average(self.own.heard(message.tensors))
        message.release()
        return answered

    def forget(self, rank: int) -> bool:
        self.lost.add(rank)
        return self.open == rank and self.ask_next()


class Pushing:
    """Only the end that is sent to changes, at its own next step."""

    def __init__(self, own: Own) -> None:
        self.own = own
        self.tags: tuple[Tag, ...] = (PUSHED,)
        self.total: list[Tensor] = []
        self.received = 0

    def begin(self, peers: Iterator[int]) -> bool:
        """Send x as our step has left it, then average it with what has come since the last one."""
        peer = next(peers, None)
        if peer is not None:
            self.own.send(peer, PUSHED, latest=True)
        if self.received:
            self.own.average(self.total, self.received)
        self.received = 0
        return True

    @torch.no_grad()
    def hear(self, message: Message) -> bool:
        heard = self.own.heard(message.tensors)
        if self.received:
            for total, y in zip(self.total, heard, strict=True):
                total.add_(y)
        else:
            self.total = [y if y.is_meta else y.clone() for y in heard]
        message.release()
        self.received += 1
        self.own.w.move(sum(total.nbytes for total in self.total))
        return False

    def forget(self, rank: int) -> bool:
        """Nobody waits for an answer here."""
        return False
