"""Shard: some slices of the weights, the clocks of the workers, and the decisions of a Consistency.

    push(i, g)   accepted: pending <- pending + g;  if ready: w <- w + rule(mean or each), version += 1
    pull(i)      if admitted: read, else park until a push or a departure frees i
    follow(o)    if another shard decides: the next update is made of one gradient of each worker in o
    exchange(x)  e = alpha (x - w);  w <- w + e;  e is returned      (the elastic move; both are encoded)

The lag of a gradient is the version that it is applied to minus the version that its worker had read, which is sent
with the push. For a rule that needs the weights that a gradient was computed at, the shard keeps the weights that
each worker read last: a copy, replaced by each read of that worker. These copies are not saved, because a resumed
worker reads before it pushes.

A push may contain the sum of several gradients (aggregation.py). A mean is then the sum of sums over the sum of their
counts, never a mean of means; where gradients are not merged, such a sum makes one update, undivided.

Nothing here sends or waits. A shard is reached by messages (the loop of a server rank) or through shared memory (the
worker that pushes runs these methods itself, under a lock of the host). Gradients are summed in the order of ranks, so
the result of a bulk method does not depend on the order of arrival.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from manyhands.core.consistency import Consistency, Picks
from manyhands.core.errors import PeerLost
from manyhands.core.flat import ParamSlot
from manyhands.core.rule import UpdateContext, corrects
from manyhands.core.state import StateSlice, restore, state_slices
from manyhands.core.strategy import Saved
from manyhands.core.vector_ops import VectorOps
from manyhands.core.weight_slice import WeightSlice
from manyhands.servers.clock_table import ClockTable, Pending
from manyhands.servers.pending_gradients import Payload, PendingGradients

SAMPLES = ":samples"
"""The name under which a shard saves how many samples were consumed."""


@dataclass(slots=True)
class ReadOnPush:
    """The request of a worker that pushes to read the new weights in the same call.

    It is granted if the push leads to an update and the worker is admitted: the update then writes the weights into the
    worker's memory too, while they are in the cache.
    """

    worker: int
    into: Sequence[Tensor]
    version: int = -1
    """The version that was written `into`; -1 if none was."""


class Shard:
    """State and decisions of one server shard; its clients are numbered from 0.

    A client is a worker, or an aggregator that pushes for several workers: `workers` says how many workers there are.
    """

    def __init__(
        self,
        ops: VectorOps,
        slices: list[WeightSlice],
        when: Consistency,
        clocks: ClockTable,
        pending: PendingGradients,
        batch_size: int,
        seen: Sequence[Sequence[Tensor]] = (),
        workers: int | None = None,
    ) -> None:
        self._ops = ops
        self.slices = slices
        self.when = when
        self.clocks = clocks
        self._pending = pending
        self._batch_size = batch_size
        self._workers = workers or clocks.workers
        self._accept = when.accept if isinstance(when, Picks) else None
        self._corrects = [corrects(one.rule) for one in slices]
        self.seen = list(seen)
        """For every client the weights it read last, a tensor per slice; empty if the rule does not need them."""
        self._options: dict[int, tuple[float, ...]] = {}
        """The options that came with the gradient of each slot."""
        self.orders: deque[tuple[Sequence[int], int]] | None = None
        """The clients whose gradients make the next updates, if another shard decides that, and the mini-batches that
        were consumed before."""
        self.announce: Callable[[Sequence[int], int], None] | None = None
        """Sends such an order to the shards that follow, if this shard decides."""

    def pull(self, i: int, at_least: int = 0) -> bool:
        """Whether client `i` may read now, and this version has been reached; if not, it is parked."""
        clocks = self.clocks
        me = clocks.worker_clock(i)
        if not self.when.admit(me) or me.version < at_least:
            clocks.parked[i], clocks.wanted[i] = 1, at_least
            return False
        if self.when.bounds_clocks:
            clocks.ahead[i] = max(0, me.clock - me.slowest)
        return True

    def push(
        self,
        i: int,
        payload: Payload,
        seen: int,
        untouched: Sequence[int] = (),
        release: Callable[[], None] = lambda: None,
        read: ReadOnPush | None = None,
        batches: int = 1,
        terms: int = 1,
        options: tuple[float, ...] = (),
    ) -> list[int]:
        """Take a gradient of some mini-batches, computed at version `seen`; returns the parked clients freed by it.

        If it is the sum of several gradients, `terms` is their number, and `seen` the oldest of their versions.
        """
        clocks = self.clocks
        if self._accept is None or self._accept(clocks.version - seen, bool(clocks.waiting[i])):
            slot = clocks.add_pending(i, seen, terms, batches)
            self._pending.put(slot, payload, untouched, release)
            self._options[slot] = options
        else:
            clocks.note_dropped(i, seen)
            clocks.batches += batches
            release()
        return self._settle(clocks.tick(i), read)

    def follow(self, clients: Sequence[int], batches: int) -> list[int]:
        """After the updates that were ordered before, make one of these clients' gradients; returns those freed.

        `batches` were consumed before it where it was decided: gradients may have been dropped there that have not
        arrived here.
        """
        assert self.orders is not None, "this shard decides for itself"
        self.orders.append((clients, batches))
        return self._settle(False)

    def leave(self, i: int) -> list[int]:
        """Client `i` has finished; returns the parked clients freed by that."""
        return self._settle(self.clocks.leave(i))

    def lose(self, i: int, loss: PeerLost) -> list[int]:
        """Client `i` is lost: the end of bulk methods, a departure for all others."""
        if not self.when.tolerates_loss:
            raise loss
        return self.leave(i)

    @torch.no_grad()
    def exchange(self, payload: Payload, alpha: float) -> Payload:
        """The elastic move: pull the weights towards a worker's, and return by how much.

        They move by the decoded answer, so what the worker loses is exactly what they gain, whatever was rounded.
        """
        ops, moves = self._ops, list[tuple[Tensor, ...]]()
        for codec, tensors, one in zip(self._pending.codecs, payload, self.slices, strict=True):
            e = ops.difference(ops.decoded(codec, tensors, one.weights), one.weights, scale=alpha)
            moves.append(ops.encoded(codec, e))
            ops.add(one.weights, ops.decoded(codec, moves[-1], e))
        self.clocks.version += 1
        return moves

    def _settle(self, slowest_moved: bool, read: ReadOnPush | None = None) -> list[int]:
        """Apply what is ready, then admit the parked clients that this may have freed."""
        clocks, when, applied = self.clocks, self.when, list[int]()
        while (due := self._due()) is not None:
            applied += [one.worker for one in due]
            groups = [due] if when.merges else [[one] for one in due]
            for group in groups:
                reads = read if read and group is groups[-1] and when.admit(clocks.worker_clock(read.worker)) else None
                self._update(group, reads)
                clocks.note_applied(group)
                clocks.version += 1
                clocks.batches += sum([one.batches for one in group])
            if self._accept is not None and clocks.pending:
                self._drop_outdated()
        freed = []
        for i in range(clocks.workers) if slowest_moved or self.orders is not None else dict.fromkeys(applied):
            if clocks.parked[i] and self.pull(i, clocks.wanted[i]):
                clocks.parked[i] = 0
                freed.append(i)
        return freed

    def _due(self) -> list[Pending] | None:
        """The gradients of the next update, in the order of ranks; None if it is not ready."""
        clocks = self.clocks
        if self.orders is not None:
            return self._ordered()
        pending = clocks.pending
        if not pending or not self.when.ready(pending, clocks.expected):
            return None
        found = clocks.all_pending()
        clocks.take(found)
        due = [one for one in found if self._pending.holds(one.slot)]
        if self.announce is not None:
            self.announce([one.worker for one in due], clocks.batches)
        return due

    def _ordered(self) -> list[Pending] | None:
        """The same for a shard that follows; of clients that have left, only what has arrived from them."""
        clocks, due = self.clocks, list[Pending]()
        if not self.orders:
            return None
        clients, batches = self.orders[0]
        for client, count in Counter(clients).items():
            found = [one for one in clocks.all_pending() if one.worker == client][:count]
            if len(found) < count and not clocks.has_left(client):
                return None
            due += found
        self.orders.popleft()
        clocks.take(due)
        clocks.batches = batches
        return due

    def _drop_outdated(self) -> None:
        """Refuse pending gradients that the last update has made too old for any other update."""
        clocks = self.clocks
        for one in clocks.all_pending():
            if self._accept is not None and not self._accept(clocks.version - one.seen, False):
                self._pending.release([one.slot])
                clocks.take([one])
                clocks.note_dropped(one.worker, one.seen)
                clocks.batches += one.batches

    def _update(self, group: list[Pending], read: ReadOnPush | None) -> None:
        """One update with the mean of the gradients of `group`, summed in rank order."""
        if not group:
            return
        slots = [one.slot for one in group]
        gradients, untouched = self._pending.read(slots)
        copies = self.read_targets(read.worker, read.into) if read else [()] * len(self.slices)
        for n, weight_slice in enumerate(self.slices):
            at = self._context(group, n)
            each = [self._context([one], n) for one in group] if len(group) > 1 and self._corrects[n] else ()
            weight_slice.apply_mean(gradients[n], at, untouched, copies[n], each, at.count if self.when.merges else 1)
        self._pending.release(slots)
        if read:
            read.version = self.clocks.version + 1

    def _context(self, group: list[Pending], n: int) -> UpdateContext:
        """Where and when the gradients of `group` are applied in the n-th slice; the oldest one determines the lag."""
        clocks, first = self.clocks, group[0].worker
        return UpdateContext(
            self.slices[n].weights,
            lag=clocks.version - min([one.seen for one in group]),
            rank=first,
            count=sum([one.terms for one in group]),
            workers=self._workers,
            samples=clocks.batches * self._batch_size,
            seen=self.seen[first][n] if self.seen else None,
            options=self._options.get(group[0].slot, ()),
        )

    def read_targets(self, i: int, into: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
        """The memory that a read of client `i` is written to, per slice: `into`, and the copy of what it read last."""
        return list(zip(into, *self.seen[i : i + 1], strict=True))

    # -- checkpoints ------------------------------------------------------------------------------

    def state_slices(self, slots: Sequence[ParamSlot]) -> list[StateSlice]:
        """The state of the rule, and how many samples were consumed."""
        samples = torch.tensor(self.clocks.batches * self._batch_size)
        return [*state_slices(self.slices, slots), StateSlice(SAMPLES, 0, samples)]

    def restore(self, slots: Sequence[ParamSlot], saved: Saved) -> None:
        """Load this shard's part of a saved state; it may be the state of the whole model."""
        restore(self.slices, slots, saved)
        self.clocks.batches = int(saved[SAMPLES]) // self._batch_size
