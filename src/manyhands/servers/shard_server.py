"""ShardServer: the loop of a rank that holds a shard (remote_shard.py is its client).

client                          server
  ASK (at least this version) -->  pull: admitted? parked?
  <-----------------  WEIGHTS (version, clocks ahead, outcomes of the client's gradients)
  PUSH (version seen) ---------->  push: apply, free the parked
  DONE  ------------------------>  leave
  PEEK  ------------------------>  answered PEEKED (the current weights); changes nothing
  FINAL ------------------------>  answered LAST (the weights) when all have finished

For a checkpoint workers quiesce: the shard treats them as departed until they join again.

  QUIESCE ---------------------->  leave
  FINAL, SAVE ------------------>  answered when all have quiesced: LAST, STATE
  JOIN  ------------------------>  joins at the slowest clock, answered READY
  RESTORE ---------------------->  load a saved state, answered READY

If one shard decides for all, its server sends the others the workers whose gradients made an update, and how many
mini-batches were consumed before it, and they follow:

  first server  ORDER (mini-batches, workers) --->  other servers

Workers then ask the first server before the others, and ask those for at least the version they have read there.

With an aggregation tree the clients are not the workers, but the aggregators of their groups: see aggregation.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import NamedTuple

from torch import Tensor

from manyhands.core.errors import PeerLost
from manyhands.core.port import Endpoint, Message, Tag, recv
from manyhands.core.worker import Worker
from manyhands.servers.pending_gradients import Payload
from manyhands.servers.shard import Shard

ASK, DONE, FINAL = Tag("ask", carries="nothing"), Tag("done", carries="nothing"), Tag("final", carries="nothing")
PUSH, WEIGHTS = Tag("push", carries="vectors"), Tag("weights", carries="floats")
EXCHANGE, MOVED = Tag("exchange", carries="vectors"), Tag("moved", carries="vectors")
QUIESCE, JOIN = Tag("quiesce", carries="nothing"), Tag("join", carries="nothing")
SAVE, STATE, RESTORE = Tag("save", carries="nothing"), Tag("state"), Tag("restore")
READY = Tag("ready", carries="nothing")
LAST = Tag("last-weights", carries="floats")
PEEK, PEEKED = Tag("peek", carries="nothing"), Tag("peeked-weights", carries="floats")
ORDER = Tag("next-update", credit=64, carries="nothing")

ALWAYS = PUSH, ASK, EXCHANGE, DONE, QUIESCE, JOIN, RESTORE, ORDER, PEEK
QUIESCED = FINAL, SAVE
"""What a server answers at any time, and what it answers only while no client is at work."""


class PushHeader(NamedTuple):
    """The numbers that are sent with a gradient; of a sum of several, the oldest version and their number."""

    seen: int
    untouched: Sequence[int]
    lengths: Sequence[int]
    """For every span of the shard how many tensors its payload has."""
    batches: int
    terms: int = 1
    options: tuple[float, ...] = ()
    """The numbers of the sender's optimizer: see core/options.py."""


def lengths_of(payload: Payload) -> tuple[int, ...]:
    """For every span how many tensors its payload has: what `regroup` needs."""
    return tuple(len(tensors) for tensors in payload)


def regroup(tensors: Sequence[Tensor], lengths: Sequence[int]) -> Payload:
    """The tensors of a message as one payload per span."""
    stops = list(accumulate(lengths))
    return [tensors[stop - length : stop] for stop, length in zip(stops, lengths, strict=True)]


class ShardServer:
    """Answers the clients of one shard.

    Args:
        w: the rank that holds the shard.
        shard: the shard.
        server_ranks: all ranks that hold shards; the loss of one ends the run.
        aggregators: the ranks that push and pull for the workers, if any; the loss of one ends the run.
        endpoint: sends and receives instead of the transport, if the shard is replicated.
    """

    def __init__(
        self,
        w: Worker,
        shard: Shard,
        server_ranks: Sequence[int],
        aggregators: Sequence[int] = (),
        endpoint: Endpoint | None = None,
    ) -> None:
        self._w = w
        self._t = w.transport
        self._endpoint: Endpoint = endpoint or w.transport
        self._shard = shard
        self._server_ranks = server_ranks
        self._vital = {*server_ranks, *aggregators}
        self._clients = aggregators or w.worker_ranks
        self._number = {rank: i for i, rank in enumerate(self._clients)}
        self._quiesced: set[int] = set()
        self._lends = endpoint is None and not shard.when.tolerates_loss and not shard.seen
        """Whether readers are sent the weights themselves instead of a copy. If no worker may be lost, the next update
        waits for a gradient of each of them, which is sent after the weights were read."""
        if shard.when.scope == "job":
            if w.rank == server_ranks[0]:
                shard.announce = self._order
            else:
                shard.orders = deque()

    def serve(self) -> None:
        """Answer clients until all have finished, then the worker that reads the result."""
        self.serve_clients()
        self.serve_reader()

    def serve_clients(self) -> None:
        """Answer until all clients have finished."""
        while (alive := self._shard.clocks.alive) or self._quiesced:
            try:
                message = recv(self._endpoint, *ALWAYS, *(() if alive else QUIESCED))
            except PeerLost as loss:
                self._lose(loss)
            else:
                self._handle(message)

    def serve_reader(self) -> None:
        """Send the weights to the lowest worker still there; if it is lost before it reads them, to the next one."""
        me = [self._w.rank] if self._t.role == "worker" else []
        while workers := [*me, *self._t.peers("worker")]:
            lead = min(workers)
            try:
                message = recv(self._endpoint, FINAL, frm=lead)
            except PeerLost as loss:
                if loss.rank in self._vital:
                    raise
            else:
                self._catch_up(*message.meta)
                self._send_weights(lead, LAST, self._weights())
                return

    def _handle(self, message: Message) -> None:
        shard, tag = self._shard, message.tag
        if tag == ORDER:
            batches, *clients = message.meta
            self._answer(shard.follow(clients, batches))
            return
        i = self._number[message.frm]
        if tag == PUSH:
            self._push(i, PushHeader(*message.meta), message)
        elif tag == ASK:
            if shard.pull(i, *message.meta):
                self._answer([i])
        elif tag == EXCHANGE:
            self._exchange(message)
        elif tag == DONE:
            self._answer(shard.leave(i))
        elif tag == PEEK:
            self._endpoint.send(message.frm, PEEKED, tensors=self._weights())
        else:
            self._handle_checkpoint(message, i)

    def _push(self, i: int, header: PushHeader, message: Message) -> None:
        payload = regroup(message.tensors, header.lengths)
        freed = self._shard.push(
            i,
            payload,
            header.seen,
            header.untouched,
            message.release,
            batches=header.batches,
            terms=header.terms,
            options=header.options,
        )
        self._answer(freed)

    def _exchange(self, message: Message) -> None:
        alpha, *lengths = message.meta
        moves = self._shard.exchange(regroup(message.tensors, lengths), alpha)
        message.release()
        self._endpoint.send(message.frm, MOVED, (self._shard.clocks.version, *lengths_of(moves)), tuple(chain(*moves)))

    def _handle_checkpoint(self, message: Message, i: int) -> None:
        shard, tag = self._shard, message.tag
        if tag == QUIESCE:
            self._quiesced.add(i)
            self._answer(shard.leave(i))
        elif tag == FINAL:
            self._catch_up(*message.meta)
            self._send_weights(message.frm, LAST, self._weights())
        elif tag == SAVE:
            self._catch_up(*message.meta)
            found = shard.state_slices(self._w.flat.slots)
            names, starts = tuple(one.name for one in found), tuple(one.start for one in found)
            meta = shard.clocks.version, names, starts
            self._endpoint.send(message.frm, STATE, meta, [one.values for one in found])
        else:
            if tag == JOIN:
                self._quiesced.discard(i)
                shard.clocks.join(i)
            else:
                shard.restore(self._w.flat.slots, dict(zip(message.meta, message.tensors, strict=True)))
                message.release()
            self._endpoint.send(message.frm, READY)

    def _order(self, clients: Sequence[int], batches: int) -> None:
        for rank in self._server_ranks[1:]:
            self._t.send(rank, ORDER, (batches, *clients))

    def _catch_up(self, version: int) -> None:
        """Follow the shard that decides until this version, which a client has read there."""
        while self._shard.clocks.version < version:
            try:
                self._handle(recv(self._endpoint, ORDER))
            except PeerLost as loss:
                self._lose(loss)

    def _lose(self, loss: PeerLost) -> None:
        if loss.rank in self._vital:
            raise loss
        if loss.rank in self._number:
            self._quiesced.discard(self._number[loss.rank])
            self._answer(self._shard.lose(self._number[loss.rank], loss))

    def _answer(self, admitted: list[int]) -> None:
        """Send the weights to these clients: one copy for all, which is also what the shard keeps as last read."""
        weights = self._weights() if admitted else []
        for i in admitted:
            self._send_weights(self._clients[i], WEIGHTS, weights)
            if self._shard.seen:
                self._shard.seen[i] = weights

    def _weights(self) -> list[Tensor]:
        """The current weights, in memory that does not change until it is read."""
        weights = [one.weights for one in self._shard.slices]
        if self._lends:
            return weights
        return [self._w.ops.clone(x) for x in weights]

    def _send_weights(self, rank: int, tag: Tag, weights: list[Tensor]) -> None:
        clocks, i = self._shard.clocks, self._number[rank]
        self._endpoint.send(rank, tag, (clocks.version, clocks.ahead[i], *clocks.take_outcomes(i)), weights)
