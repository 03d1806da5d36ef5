"""Two servers for every shard: what one of them has answered, the other one knows.

    worker                    primary, server k                  backup, server k + 1
      7 PUSH  ---------------->  handle it  --- COPY (7 PUSH) --->  handle it too
      8 ASK   ---------------->  handle it  --- COPY (8 ASK)  --->  handle it too
                                 delay the answer  <--- ACK 2 ----  store the answer
      <---- WEIGHTS (to 8) ----  send it

Two shards that handle the same messages in the same order reach the same state. So the primary forwards everything that
changes its shard, also losses of workers, in the order in which it handles them, and delays an answer until the backup
has received all that came before it. Workers number what they send, and store it until a later message is answered.

primary lost  The backup has, and handles, all that was forwarded. It sends the answers that it has stored, and serves
              alone. A worker that waits for an answer switches to it and sends again what has not been answered. By
              their numbers, the backup drops messages that it has handled, and the worker answers that it has received.
backup lost   The primary delays no answer any more, and serves alone.

Both serve until all workers are gone, so that another worker can read the result if the one that reads it is lost.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from manyhands.core.errors import PeerLost
from manyhands.core.port import ANY, Message, Meta, Tag, Transport, recv
from manyhands.core.worker import Worker
from manyhands.servers.shard_server import (
    ASK,
    DONE,
    EXCHANGE,
    FINAL,
    JOIN,
    PUSH,
    QUIESCE,
    READY,
    RESTORE,
    SAVE,
    ShardServer,
)

COPY, ACK = Tag("copy", credit=8), Tag("acknowledged", carries="nothing")
LOST, OVER = "lost", "over"
"""What is forwarded besides messages of workers: the loss of one, and that all are gone."""

CHANGING = {tag.name: tag for tag in (PUSH, ASK, EXCHANGE, DONE, QUIESCE, JOIN, RESTORE)}
KINDS = CHANGING | {tag.name: tag for tag in (FINAL, SAVE)}
CONFIRMED = DONE, QUIESCE
"""What is answered only here: a worker that sends it may not send anything again for long."""

Answer = tuple[int, Tag, Meta, Sequence[Tensor]]
"""The arguments of a `send`."""

log = logging.getLogger("manyhands")


def server_ranks_of(w: Worker, shard: int) -> tuple[int, int]:
    """The ranks of the primary and of the backup of a shard."""
    return w.servers[shard], w.servers[(shard + 1) % len(w.servers)]


def at(shard: int, tag: Tag) -> Tag:
    """The same tag for one shard, with a credit of its own: a rank may serve two shards."""
    return tag._replace(name=f"{tag.name}:{shard}")


@dataclass(slots=True)
class ReplicatedMessage:
    """A message whose tensors were copied when it was received."""

    frm: int
    tag: Tag
    meta: Meta
    tensors: tuple[Tensor, ...]

    def release(self) -> None:
        """Nothing to do: the sender has its tensors back."""

    def keep(self) -> tuple[Tensor, ...]:
        """The tensors, which are copies already."""
        return self.tensors


class ReplicatedServer:
    """The endpoint of one of the two servers of a shard.

    Args:
        w: the rank of the server: the primary's or the backup's.
        shard: the number of the shard.
    """

    def __init__(self, w: Worker, shard: int) -> None:
        self._w = w
        self._t = w.transport
        self._shard = shard
        primary, backup = server_ranks_of(w, shard)
        self._primary = primary if w.rank == backup else None
        """The rank whose messages to follow, until it is lost."""
        self._backup = backup if w.rank == primary else None
        """The rank to forward everything to, until it is lost."""
        self._forwarded = self._acked = 0
        self._handled: dict[int, int] = {}
        """The number of the last message of each worker."""
        self._delayed: deque[tuple[int, Answer]] = deque()
        """Answers, and how many forwarded messages must be acknowledged before each of them is sent."""
        self._stored: dict[int, Answer] = {}
        """The backup's last answer to each worker."""
        self._over = False

    # -- the endpoint -----------------------------------------------------------------------------

    def recv(self, *tags: Tag, frm: int = ANY) -> Message:
        """The next message for the shard; the loss of a worker is raised at its position among them."""
        while True:
            message = self._follow() if self._primary is not None else self._receive(tags, frm)
            if message is not None:
                return message

    def send(self, to: int, tag: Tag, meta: Meta = (), tensors: Sequence[Tensor] = ()) -> None:
        """Answer a worker's last message as soon as the other server has received it."""
        answer = to, at(self._shard, tag), (self._handled[to], *meta), tensors
        if self._primary is not None:
            self._stored[to] = answer
        else:
            self._delayed.append((self._forwarded, answer))
            self._send_delayed()

    def serve(self, server: ShardServer) -> None:
        """Run the server while there are workers; a backup ends when the primary does."""
        server.serve_clients()
        while self._primary is not None and not self._over:
            self._follow()
        if self._over:
            return
        while self._backup is not None and self._acked < self._forwarded:
            self._receive((), self._backup)
        while self._t.peers("worker"):
            server.serve_reader()
        self._forward(self._t.rank, OVER)

    # -- the primary, or the only one -------------------------------------------------------------

    def _receive(self, tags: Sequence[Tag], frm: int) -> ReplicatedMessage | None:
        """A message of a worker, if it is new; messages and losses of the other server are handled here."""
        try:
            message = recv(self._t, *[at(self._shard, tag) for tag in (*tags, ACK)], frm=frm)
        except PeerLost as loss:
            self._lose(loss, frm)
            return None
        if message.tag == at(self._shard, ACK):
            (self._acked,) = message.meta
            self._send_delayed()
            return None
        if message.meta[0] <= self._handled.get(message.frm, 0):
            message.release()
            return None
        name, tensors = message.tag.name.partition(":")[0], self._keep(message)
        if name in CHANGING:
            self._forward(message.frm, name, message.meta, tensors)
        return self._accept(message.frm, name, message.meta, tensors)

    def _lose(self, loss: PeerLost, frm: int) -> None:
        if loss.rank == self._backup:
            self._backup = None
            self._warn(loss)
            self._send_delayed()
        elif loss.rank not in self._w.servers:
            if frm == ANY:
                self._forward(loss.rank, LOST, (loss.why,))
            raise loss

    def _forward(self, frm: int, name: str, meta: Meta = (), tensors: Sequence[Tensor] = ()) -> None:
        if self._backup is not None:
            self._forwarded += 1
            self._t.send(self._backup, at(self._shard, COPY), (frm, name, *meta), tensors)

    def _send_delayed(self) -> None:
        while self._delayed and (self._backup is None or self._delayed[0][0] <= self._acked):
            self._t.send(*self._delayed.popleft()[1])

    # -- the backup -------------------------------------------------------------------------------

    def _follow(self) -> ReplicatedMessage | None:
        """The next message that the primary has forwarded; None if it has ended, or is lost and this one takes over."""
        assert self._primary is not None
        try:
            message = recv(self._t, at(self._shard, COPY), frm=self._primary)
        except PeerLost as loss:
            self._take_over(loss)
            return None
        frm, name, *meta = message.meta
        self._over = name == OVER
        if self._over:
            return None
        self._acked += 1
        self._t.send(self._primary, at(self._shard, ACK), (self._acked,), latest=True)
        if name == LOST:
            raise PeerLost(frm, *meta)
        return self._accept(frm, name, tuple(meta), self._keep(message))

    def _take_over(self, loss: PeerLost) -> None:
        self._primary = None
        self._warn(loss)
        for answer in self._stored.values():
            self._t.send(*answer)
        self._stored.clear()

    # -- both -------------------------------------------------------------------------------------

    def _accept(self, frm: int, name: str, meta: Meta, tensors: tuple[Tensor, ...]) -> ReplicatedMessage:
        self._handled[frm] = meta[0]
        self._stored.pop(frm, None)
        message = ReplicatedMessage(frm, KINDS[name], meta[1:], tensors)
        if message.tag in CONFIRMED:
            self.send(frm, READY)
        return message

    def _keep(self, message: Message) -> tuple[Tensor, ...]:
        return self._w.ops.keep(message)

    def _warn(self, loss: PeerLost) -> None:
        log.warning("%s; from now on rank %d serves shard %d alone", loss, self._t.rank, self._shard)


class FailoverClient:
    """A worker's endpoint to a shard with two servers: it switches to the backup when the primary is lost.

    What was sent is stored until a later message is answered; its tensors must not change before that.

    Args:
        t: the worker's transport.
        shard: the number of the shard.
        server_ranks: the primary and the backup.
        lines: this worker's endpoints to all shards. A loss is raised at the one that waits, and all of them handle it:
            another worker may wait for a message that was sent to the lost server.
    """

    def __init__(self, t: Transport, shard: int, server_ranks: Sequence[int], lines: Sequence[FailoverClient]) -> None:
        self._t = t
        self._shard = shard
        self._server, *self._others = server_ranks
        self._lines = lines
        self._sent = self._answered = 0
        self._unanswered: deque[tuple[Tag, Meta, Sequence[Tensor]]] = deque()

    def send(self, to: int, tag: Tag, meta: Meta = (), tensors: Sequence[Tensor] = ()) -> None:
        """Number and store a message, and send it to the current server."""
        self._sent += 1
        self._unanswered.append((at(self._shard, tag), (self._sent, *meta), tensors))
        self._t.send(self._server, *self._unanswered[-1])
        if tag in CONFIRMED:
            self.recv(READY)

    def recv(self, *tags: Tag, frm: int = ANY) -> Message:
        """The answer to a message that has not been answered yet."""
        while True:
            try:
                message = recv(self._t, *[at(self._shard, tag) for tag in tags])
            except PeerLost as loss:
                for line in self._lines:
                    line.lose(loss)
                continue
            number, *meta = message.meta
            if number > self._answered:
                for _ in range(number - self._answered):
                    self._unanswered.popleft()
                self._answered = number
                message.meta = tuple(meta)
                return message
            message.release()

    def lose(self, loss: PeerLost) -> None:
        """If the current server is lost, switch to the other one, and send again what has not been answered.

        Copies are sent, because an answer to the first message may arrive before the second is released.
        """
        if loss.rank in self._others:
            self._others.remove(loss.rank)
        if loss.rank != self._server:
            return
        if not self._others:
            raise loss
        self._server = self._others.pop()
        for tag, meta, tensors in self._unanswered:
            self._t.send(self._server, tag, meta, [x.clone() for x in tensors])


def failover_clients(w: Worker, shards: int) -> list[FailoverClient]:
    """A worker's endpoints to all shards."""
    lines: list[FailoverClient] = []
    lines += [FailoverClient(w.transport, k, server_ranks_of(w, k), lines) for k in range(shards)]
    return lines
