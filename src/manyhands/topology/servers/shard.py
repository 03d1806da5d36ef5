"""Shard: a stretch of the weights, who stands where, and the decisions of a Consistency.

    push(i, g)   pending <- pending + g;  if ready: w <- w + rule(mean or each), version += 1
    pull(i)      if admitted: read, else park until a push or a departure frees i
    exchange(x)  e = alpha (x - w);  w <- w + e;  e goes back        (the elastic move)

Nothing here sends or waits. Two ways lead to a shard: messages (a loop on the rank that keeps it) and
shared memory (whoever pushes runs these same methods under the host's lock). Gradients are summed in
the order of ranks, so a bulk result does not depend on who came first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from manyhands.core.errors import PeerLost
from manyhands.core.flat import Place
from manyhands.core.holding import Holding
from manyhands.core.protocols import At, Consistency, Saved
from manyhands.core.saving import Piece, pieces, restore
from manyhands.topology.servers.ledger import Ledger

Payload = Sequence[Sequence[Tensor]]
"""An encoded gradient: for every span of a shard what its codec made of it."""


SAMPLES = ":samples"
"""How many samples have come in, among what a shard saves."""


class Inbox(Protocol):
    """Where pushed gradients are until they are applied."""

    def put(self, i: int, payload: Payload, untouched: Sequence[int], release: Callable[[], None]) -> None:
        """Take in what worker `i` pushed."""

    def take(self, i: int) -> frozenset[int]:
        """Worker `i`'s gradient is about to be applied: the parameters it had not touched."""


class Lent(Inbox, Protocol):
    """An inbox of gradients that go back to their senders with `take`."""

    def write(self, i: int, place: int, out: Tensor) -> None:
        """Write worker `i`'s gradient for the shard's `place`-th holding."""


@runtime_checkable
class Lying(Inbox, Protocol):
    """An inbox of gradients that lie still until they have been applied."""

    def gradients(self, group: list[int], place: int) -> list[Tensor]:
        """The gradients of the workers `group` for the shard's `place`-th holding, to be read where they lie."""


class Means:
    """Of lent gradients, which go back before they are applied, the mean remains."""

    def __init__(self, inbox: Lent, holdings: list[Holding], merges: bool) -> None:
        self._inbox = inbox
        self._sum = [torch.empty_like(h.weights) for h in holdings]
        self._one = [torch.empty_like(h.weights) for h in holdings] if merges else []

    @torch.no_grad()
    def gradients(self, group: list[int], place: int) -> list[Tensor]:
        """The mean of the gradients of `group`, summed in rank order."""
        g = self._sum[place]
        if not g.is_meta:
            self._inbox.write(group[0], place, g)
            for i in group[1:]:
                self._inbox.write(i, place, self._one[place])
                g.add_(self._one[place])
            if len(group) > 1:
                g.div_(len(group))
        return [g]


class Shard:
    """State and decisions of one server shard; workers are numbered from 0."""

    def __init__(
        self, holdings: list[Holding], when: Consistency, ledger: Ledger, inbox: Lent | Lying, batch_size: int
    ) -> None:
        self.holdings = holdings
        self.when = when
        self.ledger = ledger
        self._inbox = inbox
        self._batch_size = batch_size
        lying = inbox if isinstance(inbox, Lying) else Means(inbox, holdings, when.merges)
        self._gradients = lying.gradients
        self.nbytes = sum(h.weights.nbytes for h in holdings)
        self._asks: tuple[int, Sequence[Tensor]] = 0, ()
        """Who has just pushed, and the memory it wants the weights in."""
        self.copied = -1
        """The version that was last copied into the memory of whoever pushed; -1 if that push copied nothing."""

    def pull(self, i: int) -> bool:
        """May worker `i` read now? If not, it is parked."""
        ledger = self.ledger
        me = ledger.standing(i)
        if not self.when.admit(me):
            ledger.parked[i] = 1
            return False
        self._let_in(i)
        return True

    def push(
        self,
        i: int,
        payload: Payload,
        seen: int,
        untouched: Sequence[int] = (),
        release: Callable[[], None] = lambda: None,
        into: Sequence[Tensor] = (),
    ) -> list[int]:
        """Take a gradient computed at version `seen`; returns the parked workers that may read now.

        If it is applied at once and its worker may read on, the weights are copied `into` its memory on the way.
        """
        ledger = self.ledger
        if not self.when.bounds_clocks:
            ledger.lag[i] = ledger.version - seen
        self._inbox.put(i, payload, untouched, release)
        ledger.add_pending(i)
        self._asks = i, into
        return self._settle(ledger.tick(i))

    def leave(self, i: int) -> list[int]:
        """Worker `i` has finished; returns who may read now."""
        return self._settle(self.ledger.leave(i))

    def lose(self, i: int, loss: PeerLost) -> list[int]:
        """Worker `i` is lost: the end of bulk methods, a departure for all others."""
        if not self.when.tolerates_loss:
            raise loss
        return self.leave(i)

    @torch.no_grad()
    def exchange(self, xs: Sequence[Tensor], alpha: float) -> list[Tensor]:
        """The elastic move: pull the weights towards `xs` and say by how much."""
        moves = [(x - h.weights).mul_(alpha) for x, h in zip(xs, self.holdings, strict=True)]
        for e, h in zip(moves, self.holdings, strict=True):
            h.weights.add_(e)
        self.ledger.version += 1
        return moves

    def _settle(self, slowest_moved: bool) -> list[int]:
        """Apply what is ready, then ask again for whoever that may have freed."""
        ledger, applied = self.ledger, []
        if ledger.pending and self.when.ready(ledger.pending, ledger.expected):
            applied = ledger.take_pending()
            for group in [applied] if self.when.merges else [[i] for i in applied]:
                self._update(group)
                ledger.version += 1
        candidates = range(ledger.workers) if slowest_moved else applied
        freed = [i for i in candidates if ledger.parked[i] and self.when.admit(ledger.standing(i))]
        for i in freed:
            ledger.parked[i] = 0
            self._let_in(i)
        return freed

    def _let_in(self, i: int) -> None:
        """Worker `i` reads now: if clocks are bounded, its lag is how far ahead of the slowest it is."""
        if self.when.bounds_clocks:
            me = self.ledger.standing(i)
            self.ledger.lag[i] = max(0, me.clock - me.slowest)

    def _update(self, group: list[int]) -> None:
        """One update with the mean of the gradients of `group`, summed in rank order."""
        gradients = [self._gradients(group, place) for place in range(len(self.holdings))]
        untouched = frozenset.intersection(*[self._inbox.take(i) for i in group])
        lag = max([self.ledger.lag[i] for i in group])
        samples = self.ledger.pushes * self._batch_size
        pusher, memory = self._asks
        copies = memory and self.when.admit(self.ledger.standing(pusher))
        for holding, gs, into in zip_longest(self.holdings, gradients, memory if copies else ()):
            at = At(holding.weights, lag=lag, rank=group[0], count=len(group), samples=samples)
            holding.merge(gs, at, untouched, into)
        self.copied = self.ledger.version + 1 if copies else -1
        self._asks = 0, ()

    # -- checkpoints ------------------------------------------------------------------------------

    def pieces(self, places: Sequence[Place]) -> list[Piece]:
        """What the rule remembers here, and how many samples have come in."""
        samples = torch.tensor(self.ledger.pushes * self._batch_size)
        return [*pieces(self.holdings, places), Piece(SAMPLES, 0, samples)]

    def restore(self, places: Sequence[Place], saved: Saved) -> None:
        """Go on from there; the saved state may be that of the whole model."""
        restore(self.holdings, places, saved)
        self.ledger.pushes = int(saved[SAMPLES]) // self._batch_size
