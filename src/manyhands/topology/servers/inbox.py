"""Where pushed gradients are until a shard applies them.

Lying    in memory where each can be read: of a message, or of this shard
Lent     in messages that must be decoded      Sums: what they come to, for which two memories are enough
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from manyhands.core.holding import Holding
from manyhands.core.protocols import Codec, Consistency, Picks

Payload = Sequence[Sequence[Tensor]]
"""An encoded gradient: for every span of a shard what its codec made of it."""


@runtime_checkable
class Plain(Protocol):
    """A codec whose payload holds the vector as it is."""

    def plain(self, payload: Sequence[Tensor]) -> Tensor:
        """The vector, to be read only."""


def encoded(codec: Codec, x: Tensor, memory: Tensor | None = None) -> tuple[Tensor, ...]:
    """What travels instead of a vector; of a model of sizes only that many bytes."""
    if x.is_meta:
        return (torch.empty(codec.nbytes(x), dtype=torch.uint8, device="meta"),)
    return codec.encode(x, memory)


def decoded(codec: Codec, payload: Sequence[Tensor], like: Tensor) -> Tensor:
    """The vector that a payload stands for, to be read only: it may lie in the payload."""
    if like.is_meta:
        return like
    if isinstance(codec, Plain):
        return codec.plain(payload)
    out = torch.empty_like(like)
    codec.decode(payload, out)
    return out


class Inbox(Protocol):
    """Where pushed gradients are until they are applied: each in a slot."""

    codecs: Sequence[Codec]
    """What everything that comes to the shard is encoded with, for every holding."""

    def put(self, slot: int, payload: Payload, untouched: Sequence[int], release: Callable[[], None]) -> None:
        """Take in what was pushed."""

    def untouched(self, slot: int) -> frozenset[int]:
        """The parameters that the worker of a gradient had not touched."""

    def give_back(self, slot: int) -> None:
        """A gradient has been applied, or never will be: its slot is free, and so is the message that brought it."""


class Lent(Inbox, Protocol):
    """An inbox of gradients that are decoded when they are applied."""

    def write(self, slot: int, place: int, out: Tensor) -> None:
        """Write a gradient for the shard's `place`-th holding."""


@runtime_checkable
class Lying(Inbox, Protocol):
    """An inbox of gradients that can be read as they lie."""

    def gradients(self, slots: list[int], place: int) -> list[Tensor]:
        """Gradients for the shard's `place`-th holding, to be read where they lie."""


class Sums:
    """Lent gradients are decoded one after the other, and only their sum remains."""

    def __init__(self, inbox: Lent, holdings: list[Holding], merges: bool) -> None:
        self._inbox = inbox
        self._sum = [torch.empty_like(h.weights) for h in holdings]
        self._one = [torch.empty_like(h.weights) for h in holdings] if merges else []

    @torch.no_grad()
    def gradients(self, slots: list[int], place: int) -> list[Tensor]:
        """The sum of some gradients, in this order."""
        g = self._sum[place]
        if not g.is_meta:
            self._inbox.write(slots[0], place, g)
            for slot in slots[1:]:
                self._inbox.write(slot, place, self._one[place])
                g.add_(self._one[place])
        return [g]


class LentInbox:
    """Gradients stay in the messages that brought them until they are applied."""

    def __init__(self, codecs: Sequence[Codec]) -> None:
        self.codecs = codecs
        self._lent: dict[int, tuple[Payload, frozenset[int], Callable[[], None]]] = {}

    def put(self, slot: int, payload: Payload, untouched: Sequence[int], release: Callable[[], None]) -> None:
        """Keep the message."""
        self._lent[slot] = payload, frozenset(untouched), release

    def write(self, slot: int, place: int, out: Tensor) -> None:
        """Decode straight from the message."""
        self.codecs[place].decode(self._lent[slot][0][place], out)

    def untouched(self, slot: int) -> frozenset[int]:
        """As its worker said."""
        return self._lent[slot][1]

    def give_back(self, slot: int) -> None:
        """Release the message."""
        self._lent.pop(slot)[2]()


class PlainInbox(LentInbox):
    """Of a plain codec they need not be decoded."""

    def __init__(self, codecs: Sequence[Codec]) -> None:
        super().__init__(codecs)
        self._plain = [codec.plain for codec in codecs if isinstance(codec, Plain)]

    def gradients(self, slots: list[int], place: int) -> list[Tensor]:
        """Where they came in."""
        return [self._plain[place](self._lent[slot][0][place]) for slot in slots]


def inbox_of(codecs: Sequence[Codec]) -> LentInbox:
    """Where gradients are until they are applied, which nobody goes on before."""
    return PlainInbox(codecs) if all(isinstance(codec, Plain) for codec in codecs) else LentInbox(codecs)


class Kept:
    """Gradients are taken out of the messages that brought them, each into memory of its own.

    So it must be where a worker may go on before its gradient is applied, and where each of several is corrected.
    """

    def __init__(self, codecs: Sequence[Codec], weights: Sequence[Tensor]) -> None:
        self.codecs = codecs
        self._like = weights
        self._kept: dict[int, list[Tensor]] = {}
        self._untouched: dict[int, frozenset[int]] = {}

    def put(self, slot: int, payload: Payload, untouched: Sequence[int], release: Callable[[], None]) -> None:
        """Decode and release the message."""
        if slot not in self._kept:
            self._kept[slot] = [torch.empty_like(x) for x in self._like]
        for codec, tensors, out in zip(self.codecs, payload, self._kept[slot], strict=True):
            if not out.is_meta:
                codec.decode(tensors, out)
        self._untouched[slot] = frozenset(untouched)
        release()

    def gradients(self, slots: list[int], place: int) -> list[Tensor]:
        """Where they were decoded to."""
        return [self._kept[slot][place] for slot in slots]

    def untouched(self, slot: int) -> frozenset[int]:
        """As its worker said."""
        return self._untouched[slot]

    def give_back(self, slot: int) -> None:
        """The message is back already; the memory stays for the next one."""
        del self._untouched[slot]


def pending_slots(when: Consistency, workers: int) -> int:
    """How many gradients may be pending at a shard together."""
    return when.most(workers) if isinstance(when, Picks) else workers
