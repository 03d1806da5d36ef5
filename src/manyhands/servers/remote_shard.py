"""RemoteShard: a client of a shard that is held by another rank, or by another activity of its own rank.

The messages are those of shard_server.py. A push is not answered: whether it was refused is sent with the next weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from manyhands.core.errors import PeerLost
from manyhands.core.flat import Span
from manyhands.core.lag import NO_OUTCOMES, Outcomes
from manyhands.core.port import Endpoint, Message, Meta, Tag, recv
from manyhands.core.state import StateSlice
from manyhands.core.strategy import Saved
from manyhands.core.vector_ops import UNCHARGED
from manyhands.core.worker import Worker
from manyhands.servers.pending_gradients import Payload
from manyhands.servers.shard_client import Moved, Pushed
from manyhands.servers.shard_server import (
    ASK,
    DONE,
    EXCHANGE,
    FINAL,
    JOIN,
    LAST,
    MOVED,
    PEEK,
    PEEKED,
    PUSH,
    QUIESCE,
    READY,
    RESTORE,
    SAVE,
    STATE,
    WEIGHTS,
    PushHeader,
    lengths_of,
    regroup,
)


class RemoteShard:
    """A worker's client of a remote shard.

    Args:
        w: the worker.
        server: the rank that holds the shard.
        spans: what the shard holds.
        first: the client of the shard that decides, if this one follows: it must be read before this one.
        endpoint: sends and receives instead of the transport, if the shard is replicated.
    """

    def __init__(
        self,
        w: Worker,
        server: int,
        spans: list[Span],
        first: RemoteShard | None = None,
        endpoint: Endpoint | None = None,
    ) -> None:
        self.spans = spans
        self.ahead = 0
        self._outcomes = NO_OUTCOMES
        self._first = first
        self._endpoint: Endpoint = endpoint or w.transport
        self._w = w
        self._ops = w.ops
        self._slots = w.flat.slots
        self._server = server
        self.version = 0

    def _send(self, tag: Tag, meta: Meta = (), tensors: Sequence[Tensor] = ()) -> None:
        """What an aggregator handles instead of the server, if there is one: pushes, pulls and membership."""
        self._endpoint.send(self._server, tag, meta, tensors)

    def _recv(self, tag: Tag) -> Message:
        return recv(self._endpoint, tag, frm=self._server)

    @property
    def _wanted(self) -> Meta:
        """The version that the shard must have reached before it answers."""
        return (0 if self._first is None else self._first.version,)

    # -- steps ------------------------------------------------------------------------------------

    def ask(self) -> None:
        self._send(ASK, self._wanted)

    def pull(self, into: Sequence[Tensor], unchanged: bool = False) -> bool:
        return self._read(self._recv(WEIGHTS), into)

    def _read(self, message: Message, into: Sequence[Tensor]) -> bool:
        _copy(message, into)
        self.version, self.ahead, *numbers = message.meta
        outcomes = Outcomes(*numbers)
        self._outcomes = self._outcomes.plus(outcomes)
        return outcomes.dropped > 0

    def push_pull(
        self, payload: Payload, untouched: Sequence[int], into: Sequence[Tensor] = (), batches: int = 1
    ) -> Pushed:
        seen = (self._first or self).version  # a shard that follows may be read later, but judges as the first does
        header = PushHeader(seen, tuple(untouched), lengths_of(payload), batches, options=self._w.options)
        self._send(PUSH, header, tuple(chain(*payload)))
        return Pushed(self.version)

    def outcomes(self) -> Outcomes:
        found, self._outcomes = self._outcomes, NO_OUTCOMES
        return found

    def exchange(self, payload: Payload, alpha: float) -> Moved:
        self._endpoint.send(self._server, EXCHANGE, (alpha, *lengths_of(payload)), tuple(chain(*payload)))
        message = recv(self._endpoint, MOVED, frm=self._server)
        version, *lengths = message.meta
        return Moved(version, regroup(self._ops.keep(message), lengths))

    # -- membership and checkpoints ---------------------------------------------------------------

    def done(self) -> None:
        self._send(DONE)

    def quiesce(self) -> None:
        self._send(QUIESCE)

    def join(self) -> None:
        self._send(JOIN)
        self._recv(READY)

    def lose(self, loss: PeerLost) -> None:
        """The server handles the loss of other ranks itself; without the server the run cannot continue."""
        if loss.rank == self._server:
            raise loss

    def peek(self, into: Sequence[Tensor]) -> None:
        self._send(PEEK)
        _copy(self._recv(PEEKED), into)

    def final(self, into: Sequence[Tensor]) -> None:
        self._endpoint.send(self._server, FINAL, self._wanted)
        self._read(recv(self._endpoint, LAST, frm=self._server), into)

    def state(self) -> list[StateSlice]:
        self._endpoint.send(self._server, SAVE, self._wanted)
        message = recv(self._endpoint, STATE, frm=self._server)
        self.version, names, starts = message.meta
        return [StateSlice(*one) for one in zip(names, starts, message.keep(), strict=True)]

    def restore(self, saved: Saved) -> None:
        mine = {slot.name for slot in self._slots if any(_overlap(slot.span, span) for span in self.spans)} | {""}
        wanted = {name: value for name, value in saved.items() if name.rpartition("/")[0] in mine}
        self._endpoint.send(self._server, RESTORE, tuple(wanted), tuple(wanted.values()))
        recv(self._endpoint, READY, frm=self._server)


@torch.no_grad()
def _copy(message: Message, into: Sequence[Tensor]) -> None:
    for x, y in zip(message.tensors, into, strict=True):
        UNCHARGED.copy(x, y)  # receiving the message has been charged
    message.release()


def _overlap(one: Span, other: Span) -> bool:
    """Whether two spans have elements in common."""
    return one.group == other.group and one.start < other.stop and other.start < one.stop
