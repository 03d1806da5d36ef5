"""Shard: a stretch of the weights, who stands where, and the decisions of a Consistency.

    push(i, g)   accepted: pending <- pending + g;  if ready: w <- w + rule(mean or each), version += 1
    pull(i)      if admitted: read, else park until a push or a departure frees i
    follow(o)    if another shard decides: the next update is made of one gradient of each worker in o
    exchange(x)  e = alpha (x - w);  w <- w + e;  e goes back        (the elastic move; both are encoded)

A gradient's staleness is the version it is applied to minus the version its worker had read, which comes with the
push. For a rule that needs to know what a gradient was computed at, the weights each worker read last are kept: a
copy, replaced whenever that worker reads. They are not saved: whoever is resumed reads before it pushes.

What is pushed may be the sum of several gradients (relay.py). A mean is then the sum of sums over the sum of their
counts, never a mean of means; where nothing is merged, such a sum is one update, in full.

Nothing here sends or waits. Two ways lead to a shard: messages (a loop on the rank that keeps it) and
shared memory (whoever pushes runs these same methods under the host's lock). Gradients are summed in
the order of ranks, so a bulk result does not depend on who came first.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from manyhands.core.errors import PeerLost
from manyhands.core.flat import Place
from manyhands.core.holding import Holding, corrects
from manyhands.core.protocols import At, Consistency, Picks, Saved
from manyhands.core.saving import Piece, pieces, restore
from manyhands.topology.servers.inbox import Lent, Lying, Payload, Plain, Sums, decoded, encoded
from manyhands.topology.servers.ledger import Ledger, Pending

NOBODY: tuple[int, Sequence[Tensor]] = 0, ()
"""Who has just pushed, and the memory it wants the weights in: nobody, none."""

SAMPLES = ":samples"
"""How many samples have come in, among what a shard saves."""


class Shard:
    """State and decisions of one server shard; workers are numbered from 0.

    If they do not come by themselves, whoever comes for several of them is numbered, and `workers` says how many
    workers there are.
    """

    def __init__(
        self,
        holdings: list[Holding],
        when: Consistency,
        ledger: Ledger,
        inbox: Lent | Lying,
        batch_size: int,
        seen: Sequence[Sequence[Tensor]] = (),
        workers: int | None = None,
    ) -> None:
        self.holdings = holdings
        self.when = when
        self.ledger = ledger
        self._inbox = inbox
        self._batch_size = batch_size
        self._workers = workers or ledger.workers
        self._accept = when.accept if isinstance(when, Picks) else None
        self._gradients = (inbox if isinstance(inbox, Lying) else Sums(inbox, holdings, when.merges)).gradients
        self.nbytes = sum(h.weights.nbytes for h in holdings)
        self.seen = list(seen)
        """For every worker the weights it read last, a tensor per holding; nothing if the rule does not need them."""
        self._asks = NOBODY
        self._hands_on = False
        """Whether this update hands the weights on to whoever asks for them."""
        self.copied = -1
        """The version that the last push copied into the memory of its worker; -1 if it copied nothing."""
        self.orders: deque[Sequence[int]] | None = None
        """Whose gradients make the next updates, if another shard decides that."""
        self.announce: Callable[[Sequence[int]], None] | None = None
        """Tell others whose gradients made an update, if this shard decides for them."""

    def pull(self, i: int, at_least: int = 0) -> bool:
        """May worker `i` read now, and is this version there? If not, it is parked."""
        ledger = self.ledger
        me = ledger.standing(i)
        if not self.when.admit(me) or me.version < at_least:
            ledger.parked[i], ledger.wanted[i] = 1, at_least
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
        batches: int = 1,
        terms: int = 1,
    ) -> list[int]:
        """Take a gradient of some mini-batches, computed at version `seen`; returns the parked that may read now.

        If it is the sum of several gradients, `terms` says of how many, and `seen` is the oldest of their versions.
        If it is applied at once and its worker may read on, the weights are copied `into` its memory on the way.
        """
        ledger = self.ledger
        ledger.batches += batches
        lag = ledger.version - seen
        if not self.when.bounds_clocks:
            ledger.lag[i] = lag
        self.copied, self._asks = -1, (i, into)
        if self._accept is None or self._accept(lag, bool(ledger.waiting[i])):
            self._inbox.put(ledger.add_pending(i, seen, terms), payload, untouched, release)
        else:
            ledger.refused[i] = 1
            release()
        freed = self._settle(ledger.tick(i))
        self._asks = NOBODY
        return freed

    def follow(self, workers: Sequence[int]) -> list[int]:
        """The next update but those that were ordered already is made by these; returns who may read now."""
        assert self.orders is not None, "this shard decides for itself"
        self.orders.append(workers)
        return self._settle(False)

    def leave(self, i: int) -> list[int]:
        """Worker `i` has finished; returns who may read now."""
        return self._settle(self.ledger.leave(i))

    def lose(self, i: int, loss: PeerLost) -> list[int]:
        """Worker `i` is lost: the end of bulk methods, a departure for all others."""
        if not self.when.tolerates_loss:
            raise loss
        return self.leave(i)

    @torch.no_grad()
    def exchange(self, payload: Payload, alpha: float) -> Payload:
        """The elastic move: pull the weights towards a worker's and say by how much.

        They move by what the worker will make of the answer: what it gives up is what they gain, to the last digit.
        """
        moves: list[tuple[Tensor, ...]] = []
        for codec, tensors, h in zip(self._inbox.codecs, payload, self.holdings, strict=True):
            e = (decoded(codec, tensors, h.weights) - h.weights).mul_(alpha)
            moves.append(encoded(codec, e))
            h.weights.add_(decoded(codec, moves[-1], e))
        self.ledger.version += 1
        return moves

    @property
    def nbytes_of_exchange(self) -> int:
        """How many bytes that moves: the gap, the weights, and, if it has to be encoded, the answer."""
        return (2 if isinstance(self._inbox.codecs[0], Plain) else 3) * self.nbytes

    def _settle(self, slowest_moved: bool) -> list[int]:
        """Apply what is ready, then ask again for whoever that may have freed."""
        ledger, applied = self.ledger, []
        while (due := self._due()) is not None:
            applied += [one.worker for one in due]
            groups = [due] if self.when.merges else [[one] for one in due]
            for group in groups:
                self._hands_on = group is groups[-1] and self._may_read_on()
                self._update(group)
                ledger.version += 1
            self._drop_outdated()
        everyone = slowest_moved or self.orders is not None
        candidates = range(ledger.workers) if everyone else dict.fromkeys(applied)
        freed = [i for i in candidates if ledger.parked[i] and self._admits(i)]
        for i in freed:
            ledger.parked[i] = 0
            self._let_in(i)
        return freed

    def _let_in(self, i: int) -> None:
        """Worker `i` reads now: if clocks are bounded, its lag is how far ahead of the slowest it is."""
        if self.when.bounds_clocks:
            me = self.ledger.standing(i)
            self.ledger.lag[i] = max(0, me.clock - me.slowest)

    def _admits(self, i: int) -> bool:
        ledger = self.ledger
        return ledger.version >= ledger.wanted[i] and self.when.admit(ledger.standing(i))

    def _due(self) -> list[Pending] | None:
        """What makes the next update, in the order of ranks; None if it is not all there."""
        ledger = self.ledger
        if self.orders is not None:
            return self._ordered()
        if not ledger.pending or not self.when.ready(ledger.pending, ledger.expected):
            return None
        due = ledger.all_pending()
        ledger.take(due)
        if self.announce is not None:
            self.announce([one.worker for one in due])
        return due

    def _ordered(self) -> list[Pending] | None:
        """The same for a shard that follows; of workers that are lost what has come from them."""
        ledger, due = self.ledger, list[Pending]()
        if not self.orders:
            return None
        for worker, many in Counter(self.orders[0]).items():
            found = [one for one in ledger.all_pending() if one.worker == worker][:many]
            if len(found) < many and not ledger.has_left(worker):
                return None
            due += found
        self.orders.popleft()
        ledger.take(due)
        return due

    def _drop_outdated(self) -> None:
        """What is still pending may have become too old for any update."""
        ledger = self.ledger
        if self._accept is None or not ledger.pending:
            return
        for one in ledger.all_pending():
            if not self._accept(ledger.version - one.seen, False):
                self._inbox.give_back(one.slot)
                ledger.take([one])
                ledger.refused[one.worker] = 1

    def _update(self, group: list[Pending]) -> None:
        """One update with the mean of the gradients of `group`, summed in rank order."""
        if not group:
            return
        slots = [one.slot for one in group]
        gradients = [self._gradients(slots, place) for place in range(len(self.holdings))]
        untouched = frozenset.intersection(*[self._inbox.untouched(slot) for slot in slots])
        into = self.memories(*self._asks) if self._hands_on else [()] * len(self.holdings)
        for place, holding in enumerate(self.holdings):
            at, each = self._at(group, place), self._each(group, place)
            over = at.count if self.when.merges else 1
            holding.merge(gradients[place], at, untouched, into[place], each, over)
        for slot in slots:
            self._inbox.give_back(slot)
        if self._hands_on:
            self.copied = self.ledger.version + 1

    def _may_read_on(self) -> bool:
        """Whether whoever has just pushed wants the weights, and may have them."""
        i, into = self._asks
        return bool(into) and self.when.admit(self.ledger.standing(i))

    def _at(self, group: list[Pending], place: int) -> At:
        """Where and when the gradients of `group` are applied; of several the oldest says how stale they are."""
        ledger, first = self.ledger, group[0].worker
        return At(
            self.holdings[place].weights,
            lag=ledger.version - min([one.seen for one in group]),
            rank=first,
            count=sum([one.terms for one in group]),
            workers=self._workers,
            samples=ledger.batches * self._batch_size,
            seen=self.seen[first][place] if self.seen else None,
        )

    def _each(self, group: list[Pending], place: int) -> list[At]:
        """The same for each gradient of several, if its rule looks at each."""
        looks = len(group) > 1 and corrects(self.holdings[place].rule)
        return [self._at([one], place) for one in group] if looks else []

    def memories(self, i: int, into: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
        """Where the weights go when worker `i` reads them, per holding: `into` its own memory, and into what it saw."""
        return list(zip(into, *self.seen[i : i + 1], strict=True))

    # -- checkpoints ------------------------------------------------------------------------------

    def pieces(self, places: Sequence[Place]) -> list[Piece]:
        """What the rule remembers here, and how many samples have come in."""
        samples = torch.tensor(self.ledger.batches * self._batch_size)
        return [*pieces(self.holdings, places), Piece(SAMPLES, 0, samples)]

    def restore(self, places: Sequence[Place], saved: Saved) -> None:
        """Go on from there; the saved state may be that of the whole model."""
        restore(self.holdings, places, saved)
        self.ledger.batches = int(saved[SAMPLES]) // self._batch_size
