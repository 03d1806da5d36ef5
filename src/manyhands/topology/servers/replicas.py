"""Two keepers for every shard: whatever one of them has answered, the other knows.

    worker                    primary, server k                  backup, server k + 1
      7 PUSH  ---------------->  handle it  --- COPY (7 PUSH) --->  handle it too
      8 ASK   ---------------->  handle it  --- COPY (8 ASK)  --->  handle it too
                                 hold the answer   <--- ACK 2 ----  keep the answer
      <---- WEIGHTS (to 8) ----  send it

A shard that handles the same messages in the same order comes to the same. So the primary passes on everything that
changes its shard, losses of workers among it, in the order in which it handles them, and holds an answer back until
the backup has everything that came before. Workers number what they send, and keep it until a later answer comes.

primary lost  The backup has, and handles, all that was passed on. It sends the answers that it has kept, and goes on
              alone. A worker that waits for an answer turns to it and sends again what has not been answered. What it
              has handled already it drops, by its number; so does the worker with an answer that it has already.
backup lost   The primary holds nothing back any more, and goes on alone.

Both stay until all workers are gone, so that the next one can read if the one who reads the outcome is lost.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from manyhands.core.errors import PeerLost
from manyhands.core.protocols import ANY, Message, Meta, Tag, Transport, recv
from manyhands.core.worker import Worker
from manyhands.topology.servers.messages import (
    ASK,
    DONE,
    EXCHANGE,
    FINAL,
    JOIN,
    PUSH,
    READY,
    REST,
    RESTORE,
    SAVE,
    Keeper,
)

COPY, ACK = Tag("copy", credit=8), Tag("acknowledged", carries="nothing")
LOST, OVER = "lost", "over"
"""What is passed on besides messages of workers: the loss of one, and that all are gone."""

CHANGING = {tag.name: tag for tag in (PUSH, ASK, EXCHANGE, DONE, REST, JOIN, RESTORE)}
KINDS = CHANGING | {tag.name: tag for tag in (FINAL, SAVE)}
CONFIRMED = DONE, REST
"""What is answered only here: whoever says it may not send anything again for long."""

Answer = tuple[int, Tag, Meta, Sequence[Tensor]]
"""To whom, and what."""

log = logging.getLogger("manyhands")


def keepers_of(w: Worker, shard: int) -> tuple[int, int]:
    """The ranks of the primary and of the backup of a shard."""
    return w.servers[shard], w.servers[(shard + 1) % len(w.servers)]


def at(shard: int, tag: Tag) -> Tag:
    """The same tag for one shard, with a credit of its own: one rank may come to keep two."""
    return tag._replace(name=f"{tag.name}:{shard}")


@dataclass(slots=True)
class Letter:
    """A message of which there are two copies, so that nobody need give it back."""

    frm: int
    tag: Tag
    meta: Meta
    tensors: tuple[Tensor, ...]

    def release(self) -> None:
        """Nobody waits for it."""

    def keep(self) -> tuple[Tensor, ...]:
        """They are ours."""
        return self.tensors


class Replica:
    """The post of one of the two keepers of a shard.

    Args:
        w: the rank of the keeper: the primary's or the backup's.
        shard: which of the shards it is.
    """

    def __init__(self, w: Worker, shard: int) -> None:
        self._w = w
        self._t = w.transport
        self._shard = shard
        primary, backup = keepers_of(w, shard)
        self._primary = primary if w.rank == backup else None
        """Whom to follow, as long as it is there."""
        self._backup = backup if w.rank == primary else None
        """Whom to pass everything on to, as long as it is there."""
        self._passed = self._acked = 0
        self._handled: dict[int, int] = {}
        """The number of the last message of each worker."""
        self._held: deque[tuple[int, Answer]] = deque()
        """Answers that wait until that much has been acknowledged."""
        self._kept: dict[int, Answer] = {}
        """The backup's: the last answer to each worker."""
        self._over = False

    # -- what a keeper needs ----------------------------------------------------------------------

    def recv(self, *tags: Tag, frm: int = ANY) -> Message:
        """The next message for the shard; the loss of a worker is raised in its place among them."""
        while True:
            letter = self._follow() if self._primary is not None else self._hear(tags, frm)
            if letter is not None:
                return letter

    def send(self, to: int, tag: Tag, meta: Meta = (), tensors: Sequence[Tensor] = ()) -> None:
        """Answer a worker's last message as soon as the other keeper knows of it."""
        answer = to, at(self._shard, tag), (self._handled[to], *meta), tensors
        if self._primary is not None:
            self._kept[to] = answer
        else:
            self._held.append((self._passed, answer))
            self._send_held()

    def serve(self, keeper: Keeper) -> None:
        """Let the keeper serve for as long as there are workers, if it is not the backup to the end."""
        keeper.serve_workers()
        while self._primary is not None and not self._over:
            self._follow()
        if self._over:
            return
        while self._backup is not None and self._acked < self._passed:
            self._hear((), self._backup)
        while self._t.peers("worker"):
            keeper.serve_reader()
        self._pass_on(self._t.rank, OVER)

    # -- the primary, or the only one -------------------------------------------------------------

    def _hear(self, tags: Sequence[Tag], frm: int) -> Letter | None:
        """Something from a worker, if it is new; news of the other keeper are dealt with here."""
        try:
            message = recv(self._t, *[at(self._shard, tag) for tag in (*tags, ACK)], frm=frm)
        except PeerLost as loss:
            self._hear_of_loss(loss, frm)
            return None
        if message.tag == at(self._shard, ACK):
            (self._acked,) = message.meta
            self._send_held()
            return None
        if message.meta[0] <= self._handled.get(message.frm, 0):
            message.release()
            return None
        name, tensors = message.tag.name.partition(":")[0], self._keep(message)
        if name in CHANGING:
            self._pass_on(message.frm, name, message.meta, tensors)
        return self._take_in(message.frm, name, message.meta, tensors)

    def _hear_of_loss(self, loss: PeerLost, frm: int) -> None:
        if loss.rank == self._backup:
            self._backup = None
            self._say_alone(loss)
            self._send_held()
        elif loss.rank not in self._w.servers:
            if frm == ANY:
                self._pass_on(loss.rank, LOST, (loss.why,))
            raise loss

    def _pass_on(self, frm: int, name: str, meta: Meta = (), tensors: Sequence[Tensor] = ()) -> None:
        if self._backup is not None:
            self._passed += 1
            self._t.send(self._backup, at(self._shard, COPY), (frm, name, *meta), tensors)

    def _send_held(self) -> None:
        while self._held and (self._backup is None or self._held[0][0] <= self._acked):
            self._t.send(*self._held.popleft()[1])

    # -- the backup -------------------------------------------------------------------------------

    def _follow(self) -> Letter | None:
        """What the primary has passed on; nothing if it is over, or lost: then we are in its place."""
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
        return self._take_in(frm, name, tuple(meta), self._keep(message))

    def _take_over(self, loss: PeerLost) -> None:
        self._primary = None
        self._say_alone(loss)
        for answer in self._kept.values():
            self._t.send(*answer)
        self._kept.clear()

    # -- both -------------------------------------------------------------------------------------

    def _take_in(self, frm: int, name: str, meta: Meta, tensors: tuple[Tensor, ...]) -> Letter:
        self._handled[frm] = meta[0]
        self._kept.pop(frm, None)
        letter = Letter(frm, KINDS[name], meta[1:], tensors)
        if letter.tag in CONFIRMED:
            self.send(frm, READY)
        return letter

    def _keep(self, message: Message) -> tuple[Tensor, ...]:
        self._w.move(sum(x.nbytes for x in message.tensors))
        return message.keep()

    def _say_alone(self, loss: PeerLost) -> None:
        log.warning("%s; from now on rank %d keeps shard %d alone", loss, self._t.rank, self._shard)


class Lifeline:
    """A worker's post to a shard that has two keepers: the second takes the place of the first.

    What was sent is kept until a later answer comes. Nobody may write into it before.

    Args:
        t: the worker's transport.
        shard: which of the shards it is.
        keepers: the primary and the backup.
        lines: this worker's posts to all shards. Whichever waits hears of a loss for all: another worker may wait for
            what was sent to the lost one.
    """

    def __init__(self, t: Transport, shard: int, keepers: Sequence[int], lines: Sequence[Lifeline]) -> None:
        self._t = t
        self._shard = shard
        self._keeper, *self._others = keepers
        self._lines = lines
        self._sent = self._answered = 0
        self._unanswered: deque[tuple[Tag, Meta, Sequence[Tensor]]] = deque()

    def send(self, to: int, tag: Tag, meta: Meta = (), tensors: Sequence[Tensor] = ()) -> None:
        """Number it, keep it, send it to whoever keeps the shard now."""
        self._sent += 1
        self._unanswered.append((at(self._shard, tag), (self._sent, *meta), tensors))
        self._t.send(self._keeper, *self._unanswered[-1])
        if tag in CONFIRMED:
            self.recv(READY)

    def recv(self, *tags: Tag, frm: int = ANY) -> Message:
        """The answer to something that has not been answered yet."""
        while True:
            try:
                message = recv(self._t, *[at(self._shard, tag) for tag in tags])
            except PeerLost as loss:
                for line in self._lines:
                    line.lose(loss)
                continue
            number, *meta = message.meta
            if number > self._answered:
                self._note_answered(number)
                message.meta = tuple(meta)
                return message
            message.release()

    def _note_answered(self, number: int) -> None:
        for _ in range(number - self._answered):
            self._unanswered.popleft()
        self._answered = number

    def lose(self, loss: PeerLost) -> None:
        """If it was our keeper, turn to the other one, if there is one, and send again what has not been answered.

        Copies, since an answer to the first time may come before the second is released.
        """
        if loss.rank in self._others:
            self._others.remove(loss.rank)
        if loss.rank != self._keeper:
            return
        if not self._others:
            raise loss
        self._keeper = self._others.pop()
        for tag, meta, tensors in self._unanswered:
            self._t.send(self._keeper, tag, meta, [x.clone() for x in tensors])


def lifelines(w: Worker, shards: int) -> list[Lifeline]:
    """A worker's posts to all shards."""
    lines: list[Lifeline] = []
    lines += [Lifeline(w.transport, k, keepers_of(w, k), lines) for k in range(shards)]
    return lines
