"""What a worker sends one way: encoded, without what it could not send yet, and never a number that is none.

    x         a vector like a part of the weights: a gradient, or how far a worker has gone
    memory    what the codec still has of earlier ones, in the same coordinates, whoever keeps which stretch

A codec that wants parameters by themselves gets each in its own shape if it lies in the stretch as a whole, else what
there is of it as a plain row.

        stretch   [ ..fc1.weight | fc1.bias | fc2.weigh.. ]
        payload   (counts, tensors of the 1st, of the 2nd, of the 3rd)        counts: how many tensors each has

Encoding draws on torch's default generator, which is seeded here by (seed, rank, step, stretch): the same in both
worlds and after a resume, and different on every worker.

Workers that want one scale ask for their own (`Sender.scale`), agree on the largest, and encode with that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from manyhands.core.errors import BadPayload, Diverged, refuse_unless
from manyhands.core.flat import Place, Span
from manyhands.core.protocols import Codec, Payload, Rounds, Saved, Shares, Warms, shares
from manyhands.core.saving import add, named
from manyhands.core.worker import Worker


@dataclass(frozen=True)
class Pieces:
    """A codec for one stretch of a model, parameter by parameter."""

    codec: Codec
    shapes: tuple[torch.Size, ...]
    by_parameter: bool = False

    @property
    def shared(self) -> bool:
        """As the codec's."""
        return shares(self.codec)

    def memory(self, like: Tensor) -> Tensor | None:
        """The codec's own."""
        return self.codec.memory(like)

    def scale(self, x: Tensor, memory: Tensor | None) -> Tensor:
        """One of each parameter."""
        codec = self._sharing()
        return torch.cat([codec.scale(*pair) for pair in self._pairs(x, memory)])

    def encode(self, x: Tensor, memory: Tensor | None) -> tuple[Tensor, ...]:
        """One payload after the other."""
        return self._joined([self.codec.encode(*pair) for pair in self._pairs(x, memory)])

    def encode_at(self, x: Tensor, memory: Tensor | None, scale: Tensor) -> tuple[Tensor, ...]:
        """The same with scales of all of them."""
        codec, scales = self._sharing(), torch.split(scale, 1)
        pairs = zip(self._pairs(x, memory), scales, strict=True)
        return self._joined([codec.encode_at(*pair, one) for pair, one in pairs])

    def _sharing(self) -> Shares:
        assert shares(self.codec), f"{self.codec} has no scale to share"
        return self.codec

    def _pairs(self, x: Tensor, memory: Tensor | None) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Each parameter with what is remembered of it."""
        cuts = [None] * len(self.shapes) if memory is None else self._cut(memory)
        return zip(self._cut(x), cuts, strict=True)

    def _joined(self, payloads: Sequence[Payload]) -> tuple[Tensor, ...]:
        counts = torch.tensor([len(payload) for payload in payloads], dtype=torch.int32)
        return counts, *(tensor for payload in payloads for tensor in payload)

    def decode(self, payload: Payload, out: Tensor) -> None:
        """Each parameter by itself."""
        first = payload[0] if payload else torch.empty(0)
        counts = first.tolist() if first.dtype == torch.int32 and first.dim() == 1 else []
        if len(counts) != len(self.shapes) or min(counts) < 0 or sum(counts) != len(payload) - 1:
            raise BadPayload(f"{len(payload)} tensors came for {len(self.shapes)} parameters")
        start = 1
        for count, piece in zip(counts, self._cut(out), strict=True):
            self.codec.decode(payload[start : start + count], piece)
            start += count

    def nbytes(self, like: Tensor) -> int:
        """Of all of them, and how many tensors each has."""
        return 4 * len(self.shapes) + sum(self.codec.nbytes(piece) for piece in self._cut(like))

    def _cut(self, x: Tensor) -> Iterator[Tensor]:
        """Views of a row, or of several, in the shapes of the parameters."""
        sizes = [shape.numel() for shape in self.shapes]
        for piece, shape in zip(torch.split(x, sizes, dim=-1), self.shapes, strict=True):
            yield piece.view(*piece.shape[:-1], *shape)


def over(codec: Codec, span: Span, places: Sequence[Place]) -> Codec:
    """A codec for one stretch of a model."""
    if not codec.by_parameter:
        return codec
    shapes = []
    for part, start, stop, shape in ((*place.span, place.shape) for place in places):
        low, high = max(start, span.start), min(stop, span.stop)
        if part == span.part and low < high:
            whole = high - low == stop - start and len(shape) > 0
            shapes.append(shape if whole else torch.Size([high - low]))
    return Pieces(codec, tuple(shapes))


PLACE = "x is where a worker is: what is left out would be taken for 0, and to send it later would be too late"


def check_rounds(codec: Codec) -> None:
    """Refuse a codec that will not do for weights."""
    refuse_unless(isinstance(codec, Rounds), "codec", codec, f"one that sends every number, such as half(): {PLACE}")


def check_alone(codec: Codec) -> None:
    """Refuse a codec that asks for one scale, where workers do not wait for each other."""
    now = codec.at(0) if isinstance(codec, Warms) else codec
    refuse_unless(not shares(now), "codec", codec, "one with a scale of its own: not all send at the same time here")


class Sender:
    """One worker's way of sending vectors like the weights.

    Args:
        w: the worker.
        codec: what they look like on the wire.
        key: tells several ways apart that the same worker sends.
    """

    def __init__(self, w: Worker, codec: Codec, key: int = 0) -> None:
        self._w = w
        self._key = key
        self.codec = codec
        self._rounds = codec if isinstance(codec, Rounds) else None
        self._warms = codec if isinstance(codec, Warms) else None  # asked in every step, so it is found out once
        self._hollow: dict[int, Tensor] = {}
        self.memory = [codec.memory(part.weights) for part in w.flat.parts]
        """What the codec remembers of every part of the model."""

    def scale(self, vector: Tensor, span: Span) -> Tensor | None:
        """The scales of a stretch, if the codec asks that all workers have the same: they agree on the largest."""
        codec, (_, start, stop) = self._codec(span), span
        if not shares(codec):
            return None
        x = vector[start:stop]
        self._w.move(x.nbytes)
        if not x.is_meta:
            self._check(vector, span)
        return codec.scale(x, self._memory(span))

    def encode(self, vector: Tensor, span: Span, scale: Tensor | None = None) -> tuple[Tensor, ...]:
        """What travels for a stretch of a vector like a whole part; of a model of sizes only that many bytes."""
        with self._w.spent.encoding():
            return self._encode(vector, span, scale)

    def _encode(self, vector: Tensor, span: Span, scale: Tensor | None) -> tuple[Tensor, ...]:
        w, (_, start, stop) = self._w, span
        x, codec = vector[start:stop], self._codec(span)
        changes = self._rounds is None or self._rounds.rounding(x.dtype) > 0
        if changes:
            w.move(x.nbytes)
        if x.is_meta:
            return (self._sized(codec.nbytes(x)),)
        if changes:
            if scale is None:
                self._check(vector, span)
            w.seed_torch(w.rank, w.step, hash((self._key, *span)))
        if scale is not None and shares(codec):
            return codec.encode_at(x, self._memory(span), scale)
        return codec.encode(x, self._memory(span))

    def _memory(self, span: Span) -> Tensor | None:
        memory = self.memory[span.part]
        return None if memory is None else memory[..., span.start : span.stop]

    def _sized(self, nbytes: int) -> Tensor:
        """Nothing but a number of bytes, made once: nobody writes there."""
        if nbytes not in self._hollow:
            self._hollow[nbytes] = torch.empty(nbytes, dtype=torch.uint8, device="meta")
        return self._hollow[nbytes]

    def _codec(self, span: Span) -> Codec:
        codec = self.codec if self._warms is None else self._warms.at(self._w.step)
        return over(codec, span, self._w.flat.places)

    def _check(self, vector: Tensor, span: Span) -> None:
        """A codec would hide what is not finite. The sum tells it, unless that is too large itself."""
        if torch.isfinite(vector[span.start : span.stop].sum()):
            return
        for place in self._w.flat.places:
            part, start, stop = place.span
            if part == span.part and start < span.stop and span.start < stop:
                found = vector[max(start, span.start) : min(stop, span.stop)]
                if not bool(found.isfinite().all()):
                    value = float(found[~found.isfinite()][0])
                    raise Diverged(self._w.rank, self._w.step, value, f"a number to be sent for {place.name}")

    @property
    def remembers(self) -> bool:
        """Whether anything is left over."""
        return any(memory is not None for memory in self.memory)

    def has_left(self, span: Span) -> bool:
        """Whether something of this stretch has not been sent yet."""
        memory = self.memory[span.part]
        return memory is not None and bool(_first(memory)[span.start : span.stop].any())

    @torch.no_grad()
    def take_back(self, span: Span, payload: Payload) -> None:
        """What was sent has not been used: it is sent again, with the next."""
        memory = self.memory[span.part]
        if memory is not None:
            row = _first(memory)[span.start : span.stop]
            lost = torch.empty_like(row)
            over(self.codec, span, self._w.flat.places).decode(payload, lost)
            row.add_(lost)

    def state(self) -> Saved:
        """What is remembered, by parameter; nothing if nothing is."""
        kept = [memory for memory in self.memory if memory is not None]
        return named(self._w.flat.places, kept) if kept else {}

    def inherit(self, saved: Saved) -> None:
        """Take over what a worker had not sent yet."""
        kept = [memory for memory in self.memory if memory is not None]
        if kept:
            add(self._w.flat.places, kept, saved)


def _first(memory: Tensor) -> Tensor:
    """What has not been sent yet."""
    return memory if memory.dim() == 1 else memory[0]
