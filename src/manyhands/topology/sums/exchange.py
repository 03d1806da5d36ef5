"""What all sums share: what a method sees of them, who takes part, and messages that cannot be mixed up.

    vector   [ ......... span ......... ]      everyone's x_k in, sum over k of decode(encode(x_k)) out
    ranks      1   4   5   9                   any sorted ranks of the job
    places     0   1   2   3                   what a sum counts in

A message carries the sum and the group in its tag's name and the number of the exchange in its key, so a rank that is
ahead is never mistaken. What was decoded is added in the order of places, by whoever adds it, so that all ranks end
with the same bits.

One scale for all, if a codec asks for it: each tells its own ahead, in P - 1 messages of one number for each parameter,
and everyone takes the largest.

Lending: a payload is lent and never written again. A codec makes it in new memory, or it is the vector itself; then a
copy of it is lent. So nobody waits for anything to come back, and the vector is free when `add_up` returns.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from manyhands.core.errors import BadPayload
from manyhands.core.flat import Span
from manyhands.core.protocols import Codec, Message, Payload, Saved, Tag, recv
from manyhands.core.sending import Sender
from manyhands.core.worker import Worker
from manyhands.topology.collectives.group import Group, Outbox

KIND = Tag("sum", carries="vectors")


class Sum(Protocol):
    """A sum over workers of vectors that travel encoded; everyone makes the same calls in the same order."""

    def add_up(self, vector: Tensor, span: Span) -> None:
        """Replace a stretch of a vector that is like a whole part of the weights by the sum over all ranks."""

    def state(self) -> Saved:
        """What this worker alone remembers."""

    def restore(self, saved: Sequence[Saved]) -> None:
        """Go on from what the workers of another run remembered, in the order of their ranks, however many."""


class Exchange:
    """One rank's view of those who sum."""

    def __init__(self, w: Worker, ranks: Sequence[int] | None, name: str) -> None:
        group = Group(w.transport, w.workers if ranks is None else ranks, name)
        self.ranks, self.place, self.size = group.ranks, group.place, group.size
        self.others = [(group.place + step) % group.size for step in range(1, group.size)]
        """The other places, from the next one on: so not everybody sends to the same one at once."""
        self._transport = w.transport
        self._tag = Tag(f"{KIND.name}:{name}:{group.label}", carries=KIND.carries)

    def begin(self) -> None:
        """Start an exchange."""
        self._tag = self._tag.of(self._tag.key + 1)

    def send(self, to: int, payload: Payload) -> None:
        """Lend a payload to a place; only plain rows travel."""
        rows = [x if x.dim() == 1 else x.reshape(-1) for x in payload]
        self._transport.send(self.ranks[to], self._tag, tensors=rows)

    def receive(self, frm: int) -> Message:
        """What a place has sent."""
        return recv(self._transport, self._tag, frm=self.ranks[frm])

    def in_order(self, mine: Payload, silent: Collection[int] = ()) -> Iterator[tuple[int, Payload]]:
        """Everyone's payload, each with its place; it goes back when the next one is asked for."""
        for place in range(self.size):
            if place in silent:
                continue
            if place == self.place:
                yield place, mine
            else:
                message = self.receive(place)
                yield place, message.tensors
                message.release()

    def agree(self, sender: Sender, vector: Tensor, spans: Sequence[Span]) -> list[Tensor | None]:
        """The scales of some stretches that all are to encode with; None if each has its own."""
        own = [sender.scale(vector, span) for span in spans]
        scales = [one for one in own if one is not None]
        if not scales:
            return own
        most = self._largest(torch.cat(scales))
        return list(torch.split(most, [one.numel() for one in scales]))

    def _largest(self, mine: Tensor) -> Tensor:
        """The largest of what all have, number by number."""
        self.begin()
        for place in self.others:
            self.send(place, (mine,))
        most = mine
        for place, payload in self.in_order((mine,)):
            if not mine.is_meta:
                check_like(mine, payload, self.ranks[place])
                most = torch.maximum(most, payload[0])
        return most

    def inherited(self, saved: Sequence[Saved]) -> Sequence[Saved]:
        """The states that this place takes over: of old worker k modulo the number of places."""
        return saved[self.place :: self.size]


def check_like(mine: Tensor, payload: Payload, rank: int) -> None:
    """Refuse what cannot be another worker's scales."""
    alike = len(payload) == 1 and payload[0].shape == mine.shape and payload[0].dtype == mine.dtype
    if not alike or not bool((payload[0].isfinite() & (payload[0] >= 0)).all()):
        raise BadPayload(f"rank {rank} has sent no {mine.numel()} scales, which must be >= 0 and finite")


def fresh(payload: Payload, vector: Tensor) -> tuple[Tensor, ...]:
    """A payload that may be lent: what lies in the vector itself is copied, for that is written next."""
    memory = vector.untyped_storage().data_ptr()
    return tuple(x.clone() if x.untyped_storage().data_ptr() == memory else x for x in payload)


def add_decoded(w: Worker, codec: Codec, payloads: Iterable[tuple[int, Payload]], out: Tensor, spare: Outbox) -> None:
    """Write the sum of what payloads stand for, in their order; `spare` is memory for one of them."""
    one = spare.like(out)
    with w.spent.encoding():
        for number, (_, payload) in enumerate(payloads):
            w.move(out.nbytes)
            if out.is_meta:
                continue
            if number == 0:
                codec.decode(payload, out)
            else:
                codec.decode(payload, one)
                out.add_(one)
