"""A shard in the shared memory of a host: whoever pushes applies, under the shard's lock.

Nobody owns the shard, so a killed worker takes none with it, and no rank serves. A worker that may not
read yet is parked; whoever frees it sends a small message.
"""

from __future__ import annotations

from collections.abc import Callable, MutableSequence, Sequence
from typing import cast

import torch
from torch import Tensor

from manyhands.core.errors import PeerLost
from manyhands.core.flat import Span
from manyhands.core.holding import Allocate, Holding
from manyhands.core.protocols import Codec, Consistency, Rule, Saved, Tag, recv
from manyhands.core.saving import Piece
from manyhands.core.sending import over
from manyhands.core.worker import Worker
from manyhands.topology.servers.inbox import Payload, Plain, pending_slots
from manyhands.topology.servers.ledger import Ledger
from manyhands.topology.servers.shard import Shard
from manyhands.topology.servers.sharding import Shards

WAKE = Tag("wake", credit=64, carries="nothing")


class SharedInbox:
    """A gradient that is applied at once is read where its worker has it.

    One that has to wait for others is decoded into shared memory, a stretch per slot, where any of them can read it.
    """

    def __init__(self, w: Worker, name: str, weights: Sequence[Tensor], codecs: Sequence[Codec], slots: int) -> None:
        self.codecs = codecs
        self._plain = [codec.plain for codec in codecs if isinstance(codec, Plain)]
        self._mine: tuple[Payload, frozenset[int]] = ((), frozenset())
        self._keeps = slots > 0
        places = len(w.flat.places)
        shared = w.transport.shared
        self._grads = [
            [shared(f"{name}.grad{slot}.{n}", x.numel(), x.dtype) for n, x in enumerate(weights)]
            for slot in range(slots)
        ]
        self._skipped = [shared(f"{name}.skip{slot}", places, torch.uint8) for slot in range(slots)]
        self._decoded = [] if slots or self._plain else [torch.empty_like(x) for x in weights]

    def put(self, slot: int, payload: Payload, untouched: Sequence[int], release: Callable[[], None]) -> None:
        """Applied at once it is read where it is; otherwise it is written where others can read it."""
        self._mine = payload, frozenset(untouched)
        if self._keeps:
            for codec, tensors, out in zip(self.codecs, payload, self._grads[slot], strict=True):
                codec.decode(tensors, out)
            self._skipped[slot].zero_()
            if untouched:
                self._skipped[slot][list(untouched)] = 1

    def gradients(self, slots: list[int], place: int) -> list[Tensor]:
        """From shared memory, or the one payload there is."""
        if self._keeps:
            return [self._grads[slot][place] for slot in slots]
        payload = self._mine[0][place]
        if self._plain:
            return [self._plain[place](payload)]
        self.codecs[place].decode(payload, self._decoded[place])
        return [self._decoded[place]]

    def untouched(self, slot: int) -> frozenset[int]:
        """As its worker said."""
        return frozenset(self._skipped[slot].nonzero().flatten().tolist()) if self._keeps else self._mine[1]

    def give_back(self, slot: int) -> None:
        """No message brought it; its memory stays for the next one."""


class SharedLane:
    """A worker's lane to a shard in its host's memory."""

    def __init__(self, w: Worker, number: int, spans: list[Span], when: Consistency, rule: Rule, codec: Codec) -> None:
        self.spans = spans
        self.lag = 0
        self.refused = False
        self._w = w
        self._t = w.transport
        self._me = w.seats.index(w.rank)
        self._name = f"shard{number}"
        self._wake = WAKE.of(number)
        self._version = 0
        self._has = -1
        """The version that lies in this worker's memory since its last push."""
        self.all: list[SharedLane] = [self]
        with self._t.lock(self._name):
            self._shard = self._find(when, rule, codec)

    def _find(self, when: Consistency, rule: Rule, codec: Codec) -> Shard:
        """Map the shard's memory; the first to come fills it."""
        w, name = self._w, self._name
        ledger = self._ledger(slots := pending_slots(when, len(w.seats)))
        first = not ledger.begun

        def allocate(key: str, fresh: Tensor) -> Tensor:
            memory = self._t.shared(f"{name}.{key}", fresh.numel(), fresh.dtype).view(fresh.shape)
            return memory.copy_(fresh) if first else memory

        holdings = [self._hold(n, rule, ledger, allocate) for n in range(len(self.spans))]
        seen: list[Tensor] = []
        if "seen" in rule.needs:  # a row per worker, where whoever applies its gradient can read it
            seen = [allocate(f"seen{n}", h.weights.expand(len(w.seats), -1)) for n, h in enumerate(holdings)]
        if first:
            ledger.begin()
        at_once = when.ready(1, 2)
        codecs = [over(codec, span, w.flat.places) for span in self.spans]
        inbox = SharedInbox(w, name, [h.weights for h in holdings], codecs, slots=0 if at_once else slots)
        return Shard(holdings, when, ledger, inbox, w.batch_size, list(zip(*seen, strict=True)), len(w.workers))

    def _ledger(self, slots: int) -> Ledger:
        w, counts = self._w, len(self._w.flat.places) * len(self.spans)
        memory = self._t.shared(f"{self._name}.ledger", Ledger.size(len(w.seats), counts, slots), torch.int64).numpy()
        cells = cast(MutableSequence[int], memoryview(memory))  # type: ignore[arg-type]
        return Ledger(len(w.seats), counts, slots, cells, w.seats[len(w.workers) :])

    def _hold(self, n: int, rule: Rule, ledger: Ledger, allocate: Allocate) -> Holding:
        """The holding of the shard's n-th span; its counts are in the ledger."""
        flat, span = self._w.flat, self.spans[n]
        weights = allocate(f"weights{n}", flat.weights(span))

        def state(key: str, fresh: Tensor) -> Tensor:
            return allocate(f"{n}.{key}", fresh)

        holding = Holding(span, weights, flat.places, rule, state, knows_seen=True)
        holding.counts = ledger.counts[n * len(flat.places) :][: len(holding.marks)]
        return holding

    def ask(self) -> None:
        """Nobody has to be asked."""

    def pull(self, into: Sequence[Tensor]) -> None:
        if self._has_newest():
            return
        while True:
            with self._t.lock(self._name):
                if self._shard.pull(self._me):
                    self._read(into)
                    return
            try:
                recv(self._t, self._wake)
            except PeerLost as loss:
                for lane in self.all:  # a worker hears of a loss once, at whichever shard it waits
                    lane.lose(loss)

    def _has_newest(self) -> bool:
        """Whether nothing has come since our last push, which has read the weights: then the lock is not needed.

        A version is one number, read in one piece. Whoever was let in then may go in now: only its own push ends that.
        """
        ledger = self._shard.ledger
        if self._has != ledger.version or not self._shard.pull(self._me):
            return False
        self._version, self.lag = self._has, ledger.lag[self._me]
        return True

    def _read(self, into: Sequence[Tensor]) -> None:
        ledger = self._shard.ledger
        self._version, self.lag = ledger.version, ledger.lag[self._me]
        if self._version == self._has:
            return
        for memories, h in zip(self._shard.memories(self._me, into), self._shard.holdings, strict=True):
            for x in memories:
                x.copy_(h.weights)
            self._w.move(len(memories) * h.weights.nbytes)

    def push(self, payload: Payload, untouched: Sequence[int], into: Sequence[Tensor] = (), batches: int = 1) -> None:
        with self._t.lock(self._name):
            self._w.move(self._shard.nbytes)
            freed = self._shard.push(self._me, payload, self._version, untouched, into=into, batches=batches)
            self._has = self._shard.copied
            if self._has >= 0:
                self._w.move((2 if self._shard.seen else 1) * self._shard.nbytes)
            ledger = self._shard.ledger
            self.lag = max(self.lag, ledger.lag[self._me])
            self.refused, ledger.refused[self._me] = bool(ledger.refused[self._me]), 0
        self._wake_up(freed)

    def exchange(self, payload: Payload, alpha: float) -> Payload:
        with self._t.lock(self._name):
            self._w.move(self._shard.nbytes_of_exchange)
            return self._shard.exchange(payload, alpha)

    def done(self) -> None:
        with self._t.lock(self._name):
            freed = self._shard.leave(self._me)
        self._wake_up(freed)

    def look(self, into: Sequence[Tensor]) -> None:
        with self._t.lock(self._name):
            for x, h in zip(into, self._shard.holdings, strict=True):
                x.copy_(h.weights)
            self._w.move(self._shard.nbytes)

    def final(self, into: Sequence[Tensor]) -> None:
        self._hear_losses()
        self._has = -1
        self.look(into)

    def rest(self) -> None:
        self.done()

    def join(self) -> None:
        with self._t.lock(self._name):
            self._shard.ledger.join(self._me)

    def _hear_losses(self) -> None:
        """Everyone has taken leave but the lost: if nobody had to wait, nobody has heard of them."""
        for rank in self._w.seats:
            while not self._shard.ledger.has_left(self._w.seats.index(rank)):
                try:
                    recv(self._t, self._wake, frm=rank)
                except PeerLost as loss:
                    self.lose(loss)

    def state(self) -> list[Piece]:
        self._hear_losses()
        with self._t.lock(self._name):
            return self._shard.pieces(self._w.flat.places)

    def restore(self, saved: Saved) -> None:
        with self._t.lock(self._name):
            self._shard.restore(self._w.flat.places, saved)

    def lose(self, loss: PeerLost) -> None:
        if loss.rank in self._w.seats:
            with self._t.lock(self._name):
                freed = self._shard.lose(self._w.seats.index(loss.rank), loss)
            self._wake_up(freed)

    def _wake_up(self, freed: list[int]) -> None:
        for i in freed:
            if i != self._me:
                self._t.send(self._w.seats[i], self._wake)


def shared_lanes(w: Worker, shards: Shards, when: Consistency, rule: Rule, codec: Codec) -> list[SharedLane]:
    """One worker's lanes to all shards of its host."""
    lanes = [SharedLane(w, number, spans, when, rule, codec) for number, spans in enumerate(shards)]
    for lane in lanes:
        lane.all = lanes
    return lanes
