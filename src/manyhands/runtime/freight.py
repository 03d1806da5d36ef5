"""Freight: how tensors travel between two ranks.

A tensor for a rank of the same host is copied once into memory that both can see, or not at all if it lies there
already (a slot, shared memory). To other hosts, and with the link "tcp" to all, its bytes go through the socket and
land in buffers that are used again.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from manyhands.runtime import wire
from manyhands.runtime.mailbox import RealMessage
from manyhands.runtime.memory import Buffers, Memory
from manyhands.runtime.seat import Seat
from manyhands.runtime.wire import Piece

INLINE = 8 * 1024
"""Bytes up to which a message is written into the socket also inside a host."""


class Load(NamedTuple):
    """Tensors on their way: what the header says of them, bytes for the socket, and memory of ours that they lie in."""

    pieces: tuple[Piece, ...] = ()
    body: tuple[bytes | memoryview, ...] = ()
    buffer: Tensor | None = None


class Freight:
    """One rank's loading and unloading."""

    def __init__(self, seat: Seat, memory: Memory) -> None:
        self._seat = seat
        self._memory = memory
        self.landings = Buffers(lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8))
        self.outgoing = Buffers(memory.fresh)

    def load(self, to: int, name: str, tensors: list[Tensor]) -> Load:
        """Make them ready for a rank: in the body, or in memory of this host."""
        near = self._seat.link == "shm" and self._seat.hosts[to] == self._seat.host
        if near and sum([x.nbytes for x in tensors]) > INLINE:
            return self._shown(to, name, tensors)
        body: list[bytes | memoryview] = []
        for x in tensors:
            body += wire.as_bytes(x), bytes(wire.padded(x.nbytes) - x.nbytes)
        return Load(tuple([Piece(x.dtype, tuple(x.shape)) for x in tensors]), tuple(body))

    def _shown(self, to: int, name: str, tensors: list[Tensor]) -> Load:
        found = [self._memory.find(x) for x in tensors]
        need = sum([wire.padded(x.nbytes) for x, place in zip(tensors, found, strict=True) if place is None])
        buffer = self.outgoing.take((to, name), need) if need else None
        pieces, start = [], 0
        for x, place in zip(tensors, found, strict=True):
            piece = Piece(x.dtype, tuple(x.shape))
            if not x.nbytes:
                pieces.append(piece)
                continue
            if place is None:
                assert buffer is not None
                wire.placed(buffer, piece, start).copy_(x)
                place = self._memory.find(buffer[start:])
                start += wire.padded(x.nbytes)
            assert place is not None
            pieces.append(piece._replace(region=place[0], size=place[1], offset=place[2]))
        return Load(tuple(pieces), (), buffer)

    def unload(self, message: RealMessage) -> tuple[Tensor, ...]:
        """The tensors of a message, where they are."""
        body = torch.empty(0, dtype=torch.uint8) if message.body is None else message.body
        inline = iter(wire.cut(body, message.pieces))
        return tuple([self._seen(piece) if piece.region else next(inline) for piece in message.pieces])

    def _seen(self, piece: Piece) -> Tensor:
        return wire.placed(self._memory.region(piece.region, piece.size), piece, piece.offset)


def plain(x: Tensor) -> Tensor:
    """The tensor as it travels: without history, in one piece, in main memory (from a GPU: untested)."""
    return x.detach().cpu().contiguous()
