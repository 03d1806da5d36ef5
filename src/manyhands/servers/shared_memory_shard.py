"""SharedMemoryShard: a shard in the shared memory of a host. The worker that pushes applies, under the shard's lock.

No process owns the shard, so no shard is lost with a killed worker, and no rank serves. A worker that is not admitted
is parked and waits for a WAKE message of the worker whose push frees it.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from typing import cast

import torch
from torch import Tensor

from manyhands.core.encoder import codec_for_span
from manyhands.core.errors import PeerLost
from manyhands.core.flat import Span
from manyhands.core.lag import NO_OUTCOMES, Outcomes
from manyhands.core.port import Tag, recv
from manyhands.core.rule import Rule
from manyhands.core.sharding import Shards
from manyhands.core.state import StateSlice
from manyhands.core.strategy import Saved
from manyhands.core.weight_slice import Allocate, WeightSlice
from manyhands.core.worker import Worker
from manyhands.servers.clock_table import ClockTable
from manyhands.servers.pending_gradients import Payload, PendingGradients, decode_when_applied, pending_slots
from manyhands.servers.server_setup import ServerSetup
from manyhands.servers.shard import ReadOnPush, Shard
from manyhands.servers.shard_client import Moved, Pushed

WAKE = Tag("wake", credit=64, carries="nothing")


class SharedMemoryShard:
    """A worker's client of a shard in the memory of its host."""

    def __init__(self, w: Worker, number: int, spans: list[Span], setup: ServerSetup) -> None:
        self.spans = spans
        self.ahead = 0
        self._w = w
        self._t = w.transport
        self._me = w.worker_ranks.index(w.rank)
        self._name = f"shard{number}"
        self._wake = WAKE.of(number)
        self.version = 0
        self._outcomes = NO_OUTCOMES
        self.all: list[SharedMemoryShard] = [self]
        with self._t.lock(self._name):
            self._shard = self._map(setup)

    def _map(self, setup: ServerSetup) -> Shard:
        """Map the shard's memory; the first worker initializes it."""
        w, when, rule = self._w, setup.when, setup.rule
        slots = pending_slots(when, len(w.worker_ranks))
        clocks = self._clock_table(slots)
        first = not clocks.begun

        def shared(key: str, like: Tensor) -> Tensor:
            return w.shared(f"{self._name}.{key}", like)

        def allocate(key: str, fresh: Tensor) -> Tensor:
            memory = shared(key, fresh)
            return memory.copy_(fresh) if first else memory

        slices = [self._slice(n, rule, clocks, allocate) for n in range(len(self.spans))]
        weights = [one.weights for one in slices]
        seen: list[Tensor] = []
        if "seen" in rule.needs:  # a row per worker, readable by the worker that applies its gradient
            seen = [allocate(f"seen{n}", x.expand(len(w.worker_ranks), -1)) for n, x in enumerate(weights)]
        if first:
            clocks.begin()
        codecs = [codec_for_span(setup.codec, span, w.flat.slots) for span in self.spans]
        if when.ready(1, 2):  # each gradient is applied by the push that brings it
            pending = PendingGradients(w.ops, codecs, weights, decode_when_applied(codecs))
        else:
            pending = PendingGradients(w.ops, codecs, weights, "on_push", len(w.flat.slots), slots, shared)
        return Shard(w.ops, slices, when, clocks, pending, w.batch_size, list(zip(*seen, strict=True)), len(w.workers))

    def _clock_table(self, slots: int) -> ClockTable:
        w, counts = self._w, len(self._w.flat.slots) * len(self.spans)
        size = ClockTable.size(len(w.worker_ranks), counts, slots)
        memory = self._t.shared(f"{self._name}.clocks", size, torch.int64).numpy()
        cells = cast(MutableSequence[int], memoryview(memory))  # type: ignore[arg-type]
        return ClockTable(len(w.worker_ranks), counts, slots, cells, w.worker_ranks[len(w.workers) :])

    def _slice(self, n: int, rule: Rule, clocks: ClockTable, allocate: Allocate) -> WeightSlice:
        """The slice of the shard's n-th span; its update counts are in the clock table."""
        flat, span = self._w.flat, self.spans[n]
        weights = allocate(f"weights{n}", flat.weights(span))

        def state(key: str, fresh: Tensor) -> Tensor:
            return allocate(f"{n}.{key}", fresh)

        weight_slice = WeightSlice(self._w.ops, span, weights, flat.slots, rule, state, knows_seen=True)
        weight_slice.counts = clocks.counts[n * len(flat.slots) :][: len(weight_slice.param_ids)]
        return weight_slice

    # -- steps ------------------------------------------------------------------------------------

    def ask(self) -> None:
        """Nothing to announce: a pull reads the memory itself."""

    def pull(self, into: Sequence[Tensor], unchanged: bool = False) -> bool:
        shard, clocks = self._shard, self._shard.clocks
        # Without the lock if the last push has read the newest version: a version is one integer, read atomically, and
        # a worker that was admitted by its push stays admitted until its next one.
        if unchanged and self.version == clocks.version and shard.pull(self._me):
            self.ahead = clocks.ahead[self._me]
            return False
        while True:
            with self._t.lock(self._name):
                if shard.pull(self._me):
                    self._read(into, unchanged)
                    return self._take_outcomes().dropped > 0
            try:
                recv(self._t, self._wake)
            except PeerLost as loss:
                for client in self.all:  # a loss is raised once per worker, at one of its shards
                    client.lose(loss)

    def _read(self, into: Sequence[Tensor], unchanged: bool) -> None:
        clocks, slices = self._shard.clocks, self._shard.slices
        before, self.version, self.ahead = self.version, clocks.version, clocks.ahead[self._me]
        if unchanged and self.version == before:
            return
        for targets, one in zip(self._shard.read_targets(self._me, into), slices, strict=True):
            for x in targets:
                self._w.ops.copy(one.weights, x)

    def push_pull(
        self, payload: Payload, untouched: Sequence[int], into: Sequence[Tensor] = (), batches: int = 1
    ) -> Pushed:
        shard, me = self._shard, self._me
        read = ReadOnPush(me, into) if into else None
        with self._t.lock(self._name):
            freed = shard.push(me, payload, self.version, untouched, read=read, batches=batches)
            if read and read.version >= 0:
                self.version = read.version
            refused = self._take_outcomes().dropped > 0
        if freed:
            self._wake_up(freed)
        return Pushed(self.version, read is not None and read.version >= 0, refused)

    def _take_outcomes(self) -> Outcomes:
        """What the shard knows by now of this worker's gradients, which `outcomes` returns too."""
        found = self._shard.clocks.take_outcomes(self._me)
        self._outcomes = self._outcomes.plus(found)
        return found

    def outcomes(self) -> Outcomes:
        found, self._outcomes = self._outcomes, NO_OUTCOMES
        return found

    def exchange(self, payload: Payload, alpha: float) -> Moved:
        with self._t.lock(self._name):
            moves = self._shard.exchange(payload, alpha)
            return Moved(self._shard.clocks.version, moves)

    def _wake_up(self, freed: list[int]) -> None:
        for i in freed:
            if i != self._me:
                self._t.send(self._w.worker_ranks[i], self._wake)

    # -- membership and checkpoints ---------------------------------------------------------------

    def done(self) -> None:
        with self._t.lock(self._name):
            freed = self._shard.leave(self._me)
        self._wake_up(freed)

    def quiesce(self) -> None:
        self.done()

    def join(self) -> None:
        with self._t.lock(self._name):
            self._shard.clocks.join(self._me)

    def lose(self, loss: PeerLost) -> None:
        if loss.rank in self._w.worker_ranks:
            with self._t.lock(self._name):
                freed = self._shard.lose(self._w.worker_ranks.index(loss.rank), loss)
            self._wake_up(freed)

    def _await_departures(self) -> None:
        """All workers but the lost ones have left. A loss that was not raised yet, because no worker waited, is now."""
        for i, rank in enumerate(self._w.worker_ranks):
            while not self._shard.clocks.has_left(i):
                try:
                    recv(self._t, self._wake, frm=rank)
                except PeerLost as loss:
                    self.lose(loss)

    def peek(self, into: Sequence[Tensor]) -> None:
        with self._t.lock(self._name):
            for x, one in zip(into, self._shard.slices, strict=True):
                self._w.ops.copy(one.weights, x)

    def final(self, into: Sequence[Tensor]) -> None:
        self._await_departures()
        self.peek(into)

    def state(self) -> list[StateSlice]:
        self._await_departures()
        with self._t.lock(self._name):
            return self._shard.state_slices(self._w.flat.slots)

    def restore(self, saved: Saved) -> None:
        with self._t.lock(self._name):
            self._shard.restore(self._w.flat.slots, saved)


def shared_memory_shards(w: Worker, shards: Shards, setup: ServerSetup) -> list[SharedMemoryShard]:
    """One worker's clients of all shards of its host."""
    clients = [SharedMemoryShard(w, number, spans, setup) for number, spans in enumerate(shards)]
    for client in clients:
        client.all = clients
    return clients
