"""Exchanges: how a worker averages its x with that of a peer, and the activity that owns x.

    PullAverage        x_i <- (x_i + x_j) / 2              i requests x_j; j does not change
    PushAverage        x_j <- (x_j + sum x_i) / (1 + n)    i sends and continues; at its next step j averages all n
    PairwiseAverage    x_i, x_j <- (x_i + x_j) / 2         i offers, j accepts, both change: the mean of all x is kept

A pairwise exchange is atomic: while a worker's own exchange is open it refuses offers, and the refused worker tries its
next peer; if two workers have made each other an offer, each takes the other's offer as the answer. So there is no
cycle of waiting workers. A push never waits: if the receiver has not read the last one of the same sender, the newer
replaces it.

    main program                              communication activity (PeerLoop)
    x^, the model's weights                   x, which peers may change at any time
    g = gradient(x^)
    `take_step`: g ------------------------>  x <- x + rule(g), before or after an exchange
    waits  <--------------------------------  x^ <- x

Only the activity accesses x, and it writes x^ only while the main program waits, so no lock is needed. The main program
may access x while all workers are quiesced: then x is saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, Protocol

import torch
from torch import Tensor

from manyhands.core.errors import PeerLost
from manyhands.core.lag import step_lag
from manyhands.core.port import Message, Tag, recv
from manyhands.peers.peer_model import PeerModel

GRADIENT, MOVED = Tag("gradient"), Tag("moved-on", carries="nothing")
SETTLE, SETTLED = Tag("settle", carries="nothing"), Tag("settled", carries="nothing")
OFFER, ACCEPT, REFUSE = Tag("offer", credit=8), Tag("accept", credit=8), Tag("refuse", credit=8)
REQUEST, MODEL, PUSHED = Tag("request", carries="nothing"), Tag("model"), Tag("pushed")


class PeerExchange(Protocol):
    """One worker's side of all exchanges. Each method returns whether the worker's own exchange is complete now."""

    tags: tuple[Tag, ...]

    def begin(self, peers: Iterator[int]) -> bool:
        """Start an exchange with the first of these peers that is available; without peers there is none."""

    def receive(self, message: Message) -> bool:
        """Handle a message of a peer: a request, or an answer."""

    def lose(self, rank: int) -> bool:
        """A peer is lost and will not answer."""


class PairwiseAverage:
    """Both workers change."""

    def __init__(self, own: PeerModel) -> None:
        self.own = own
        self.tags: tuple[Tag, ...] = (OFFER, ACCEPT, REFUSE)
        self.open: int | None = None
        self.untried: Iterator[int] = iter(())

    def begin(self, peers: Iterator[int]) -> bool:
        self.untried = peers
        return self._offer_to_next()

    def _offer_to_next(self) -> bool:
        """Offer x to the next peer; if all have refused, there is no exchange."""
        self.open = next(self.untried, None)
        if self.open is not None:
            self.own.send(self.open, OFFER)
        return self.open is None

    def receive(self, message: Message) -> bool:
        if message.tag == OFFER and message.frm != self.open:
            self._answer(message)
            return False
        if message.frm != self.open:  # of a peer that was lost after it had sent this
            message.release()
            return False
        if message.tag == REFUSE:
            return self._offer_to_next()
        self.open = None
        self.own.average(self.own.decode_model(message.tensors))
        message.release()
        return True

    def _answer(self, offer: Message) -> None:
        """Accept an offer and average, unless an exchange of our own is open."""
        if self.open is None:
            self.own.send(offer.frm, ACCEPT)
            self.own.average(self.own.decode_model(offer.tensors))
            self.own.changed_by_peer()
        else:
            self.own.w.transport.send(offer.frm, REFUSE)
        offer.release()

    def lose(self, rank: int) -> bool:
        return self.open == rank and self._offer_to_next()


class PullAverage:
    """Only the worker that requests changes."""

    def __init__(self, own: PeerModel) -> None:
        self.own = own
        self.tags: tuple[Tag, ...] = (REQUEST, MODEL)
        self.open: int | None = None
        self.untried: Iterator[int] = iter(())

    def begin(self, peers: Iterator[int]) -> bool:
        self.untried = peers
        return self._request_next()

    def _request_next(self) -> bool:
        """Request the x of a peer; of the next one if it is lost."""
        self.open = next(self.untried, None)
        if self.open is not None:
            self.own.w.transport.send(self.open, REQUEST)
        return self.open is None

    def receive(self, message: Message) -> bool:
        if message.tag == REQUEST:
            self.own.send(message.frm, MODEL)
            return False
        answered = message.frm == self.open  # if not, its sender was lost after it had sent this
        if answered:
            self.open = None
            self.own.average(self.own.decode_model(message.tensors))
        message.release()
        return answered

    def lose(self, rank: int) -> bool:
        return self.open == rank and self._request_next()


class PushAverage:
    """Only the receiver changes, at its own next step."""

    def __init__(self, own: PeerModel) -> None:
        self.own = own
        self.tags: tuple[Tag, ...] = (PUSHED,)
        self.total: list[Tensor] = []
        self.received = 0

    def begin(self, peers: Iterator[int]) -> bool:
        """Send x as it is after the own step, then average it with all that was received since the last step."""
        peer = next(peers, None)
        if peer is not None:
            self.own.send(peer, PUSHED, latest=True)
        if self.received:
            self.own.average(self.total, self.received)
        self.received = 0
        return True

    @torch.no_grad()
    def receive(self, message: Message) -> bool:
        decoded, ops = self.own.decode_model(message.tensors), self.own.w.ops
        if self.received:
            for total, y in zip(self.total, decoded, strict=True):
                ops.add(total, y)
        else:
            self.total = [ops.clone(y) for y in decoded]
        message.release()
        self.received += 1
        self.own.changed_by_peer()
        return False

    def lose(self, rank: int) -> bool:
        """A push has no answer, so there is nothing to give up."""
        return False


class PeerLoop:
    """The communication activity of a worker, and what the main program calls.

    Args:
        own: x.
        exchange: how x is averaged with that of a peer.
        update: whether x is updated by the gradient before or after the exchange.
        choose: the peers of the next exchange, in the order in which they are tried.
    """

    def __init__(
        self,
        own: PeerModel,
        exchange: PeerExchange,
        update: Literal["before", "after"],
        choose: Callable[[], Iterator[int]],
    ) -> None:
        self.own = own
        self.exchange = exchange
        self.update = update
        self.choose = choose
        self.lost: set[int] = set()
        self.gradient: Message | None = None
        self._transport, self._rank = own.w.transport, own.w.rank
        self._transport.spawn(self._run, daemon=True)

    # -- the main program -------------------------------------------------------------------------

    @torch.no_grad()
    def take_step(self) -> None:
        """Pass the gradient to the activity, and wait until x^ is the x that it has been applied to."""
        flat = self.own.w.flat
        gradients = [group.grad for group in flat.groups]
        self._transport.send(self._rank, GRADIENT, tuple(sorted(flat.untouched())), gradients)
        recv(self._transport, MOVED, frm=self._rank)
        self.own.w.lag = step_lag(self.own.lag)

    def settle(self) -> None:
        """Average what has been received; for a pause, in which no step follows that would do it."""
        self._transport.send(self._rank, SETTLE)
        recv(self._transport, SETTLED, frm=self._rank)

    # -- the activity, sole owner of x ------------------------------------------------------------

    def _run(self) -> None:
        """Answer peers and carry out our own exchanges, one message at a time."""
        while True:
            try:
                message = recv(self._transport, GRADIENT, SETTLE, *self.exchange.tags)
            except PeerLost as loss:
                self.lost.add(loss.rank)
                complete = self.exchange.lose(loss.rank)
            else:
                complete = self._handle(message)
            if complete:
                self._end_step()

    def _handle(self, message: Message) -> bool:
        """Whether our own exchange is complete after this message."""
        if message.tag == GRADIENT:
            if self.update == "before":
                self.own.update(message)
            else:
                self.gradient = message
            return self.exchange.begin(rank for rank in self.choose() if rank not in self.lost)
        if message.tag == SETTLE:
            self.exchange.begin(iter(()))
            self._transport.send(self._rank, SETTLED)
            return False
        return self.exchange.receive(message)

    def _end_step(self) -> None:
        """The exchange is complete: the main program continues with the new x."""
        if self.gradient is not None:
            self.own.update(self.gradient)
            self.gradient = None
        self.own.show()
        self._transport.send(self._rank, MOVED)
