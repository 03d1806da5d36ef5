"""Encoder: a worker's payloads, with the codec's memory. NaN and infinity are refused before they are encoded.

    x         a vector like a dtype group of the weights: a gradient, or the difference of two models
    memory    what the codec has not sent yet, in the same coordinates, for whichever spans are encoded

A codec by parameter gets each parameter in its own shape if the span holds all of it, else the part in the span as a
flat row.

        span      [ ..fc1.weight | fc1.bias | fc2.weigh.. ]
        payload   (counts, tensors of the 1st, of the 2nd, of the 3rd)        counts: how many tensors each has

Codecs draw from torch's default generator, which is seeded here by (seed, rank, step, key, span): the same in
simulated and real runs and after a resume, and different on every worker.

With a codec that shares its scale, workers ask for their own (`Encoder.scale`), agree on the largest, and encode with
that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from manyhands.core.codec import (
    Codec,
    CodecTraits,
    Payload,
    RoundingCodec,
    Shares,
    Warms,
    most_bytes,
    shares,
)
from manyhands.core.errors import BadPayload, Diverged, refuse_unless
from manyhands.core.flat import ParamSlot, Span
from manyhands.core.state import add, named, refuse_lost
from manyhands.core.strategy import Saved
from manyhands.core.vector_ops import sized
from manyhands.core.worker import Worker


@dataclass(frozen=True)
class PerParameterCodec:
    """A codec for one span of a model, parameter by parameter."""

    codec: Codec
    shapes: tuple[torch.Size, ...]
    by_parameter: bool = False

    @property
    def traits(self) -> CodecTraits:
        """As the codec inside; but there are several parameters."""
        return replace(self.codec.traits, plain=False)

    @property
    def shared(self) -> bool:
        """As the codec inside."""
        return shares(self.codec)

    def memory(self, like: Tensor) -> Tensor | None:
        """As the codec inside: its memory is cut like the vector."""
        return self.codec.memory(like)

    def scale(self, x: Tensor, memory: Tensor | None) -> Tensor:
        """A scale for each parameter."""
        codec = self._sharing()
        return torch.cat([codec.scale(*pair) for pair in self._pairs(x, memory)])

    def encode(self, x: Tensor, memory: Tensor | None) -> tuple[Tensor, ...]:
        """The payloads of all parameters, one after the other."""
        return self._joined([self.codec.encode(*pair) for pair in self._pairs(x, memory)])

    def encode_at(self, x: Tensor, memory: Tensor | None, scale: Tensor) -> tuple[Tensor, ...]:
        """The same with a given scale for each parameter."""
        codec, scales = self._sharing(), torch.split(scale, 1)
        pairs = zip(self._pairs(x, memory), scales, strict=True)
        return self._joined([codec.encode_at(*pair, one) for pair, one in pairs])

    def _sharing(self) -> Shares:
        assert shares(self.codec), f"{self.codec} has no scale to share"
        return self.codec

    def _pairs(self, x: Tensor, memory: Tensor | None) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Each parameter with its memory."""
        cuts = [None] * len(self.shapes) if memory is None else self._cut(memory)
        return zip(self._cut(x), cuts, strict=True)

    def _joined(self, payloads: Sequence[Payload]) -> tuple[Tensor, ...]:
        counts = torch.tensor([len(payload) for payload in payloads], dtype=torch.int32)
        return counts, *(tensor for payload in payloads for tensor in payload)

    def decode(self, payload: Payload, out: Tensor) -> None:
        """Decode each parameter separately."""
        first = payload[0] if payload else torch.empty(0)
        counts = first.tolist() if first.dtype == torch.int32 and first.dim() == 1 else []
        if len(counts) != len(self.shapes) or min(counts) < 0 or sum(counts) != len(payload) - 1:
            raise BadPayload(f"a payload of {len(payload)} tensors does not fit {len(self.shapes)} parameters")
        start = 1
        for count, piece in zip(counts, self._cut(out), strict=True):
            self.codec.decode(payload[start : start + count], piece)
            start += count

    def nbytes(self, like: Tensor) -> int:
        """The bytes of all parameters, and of the counts."""
        return 4 * len(self.shapes) + sum(self.codec.nbytes(piece) for piece in self._cut(like))

    def most(self, like: Tensor) -> int:
        """The largest number of bytes of all parameters together."""
        return 4 * len(self.shapes) + sum(most_bytes(self.codec, piece) for piece in self._cut(like))

    def _cut(self, x: Tensor) -> Iterator[Tensor]:
        """Views of a row, or of several, in the shapes of the parameters."""
        sizes = [shape.numel() for shape in self.shapes]
        for piece, shape in zip(torch.split(x, sizes, dim=-1), self.shapes, strict=True):
            yield piece.view(*piece.shape[:-1], *shape)


def codec_for_span(codec: Codec, span: Span, slots: Sequence[ParamSlot]) -> Codec:
    """The codec for one span of a model; by parameter, if it asks for that."""
    if not codec.by_parameter:
        return codec
    shapes = []
    for group, start, stop, shape in ((*slot.span, slot.shape) for slot in slots):
        low, high = max(start, span.start), min(stop, span.stop)
        if group == span.group and low < high:
            whole = high - low == stop - start and len(shape) > 0
            shapes.append(shape if whole else torch.Size([high - low]))
    return PerParameterCodec(codec, tuple(shapes))


WEIGHTS = "x holds weights: the receiver would take a number that is not sent for 0, and sending it later is too late"


def check_rounds(codec: Codec) -> None:
    """Refuse a codec that cannot encode weights."""
    refuse_unless(
        isinstance(codec, RoundingCodec), "codec", codec, f"one that sends every number, such as half(): {WEIGHTS}"
    )


def check_alone(codec: Codec) -> None:
    """Refuse a codec that asks for a common scale, in a method whose workers do not wait for each other."""
    now = codec.at(0) if isinstance(codec, Warms) else codec
    refuse_unless(
        not shares(now), "codec", codec, "one with a scale of its own: workers do not send at the same time here"
    )


class Encoder:
    """Encodes vectors like the weights of one worker, and keeps the codec's memory of them.

    Args:
        w: the worker.
        codec: encodes them.
        key: distinguishes several encoders of one worker, which then draw different random numbers.
    """

    def __init__(self, w: Worker, codec: Codec, key: int = 0) -> None:
        self._w = w
        self._key = key
        self.codec = codec
        self._is_plain = codec.traits.plain
        self._rounds = codec if isinstance(codec, RoundingCodec) else None
        self._warms = codec if isinstance(codec, Warms) else None  # needed in every step, so it is looked up once
        self.memory = [codec.memory(group.weights) for group in w.flat.groups]
        """The codec's memory of every dtype group of the model."""

    def scale(self, vector: Tensor, span: Span) -> Tensor | None:
        """This worker's scales of a span, if the codec asks for common ones; workers agree on the largest."""
        codec, (_, start, stop) = self._codec(span), span
        if not shares(codec):
            return None
        x = vector[start:stop]
        if self._w.ops.computes(x):
            self._check(vector, span)
        return codec.scale(x, self._memory(span))

    def encode(self, vector: Tensor, span: Span, scale: Tensor | None = None) -> tuple[Tensor, ...]:
        """The payload of a span of a vector like a dtype group; for a meta tensor a meta tensor of as many bytes."""
        if self._is_plain:
            return (vector[span.start : span.stop],)
        with self._w.timer.encoding():
            return self._encode(vector, span, scale)

    def _encode(self, vector: Tensor, span: Span, scale: Tensor | None) -> tuple[Tensor, ...]:
        w, (_, start, stop) = self._w, span
        x, codec = vector[start:stop], self._codec(span)
        changes = self._rounds is None or self._rounds.rounding(x.dtype) > 0
        if not w.ops.computes(x, passes=1 if changes else 0):
            return (sized(codec.nbytes(x)),)
        if changes:
            if scale is None:
                self._check(vector, span)
            w.seed_torch(w.rank, w.step, hash((self._key, *span)))
        if scale is not None and shares(codec):
            return codec.encode_at(x, self._memory(span), scale)
        return codec.encode(x, self._memory(span))

    def _memory(self, span: Span) -> Tensor | None:
        memory = self.memory[span.group]
        return None if memory is None else memory[..., span.start : span.stop]

    def _codec(self, span: Span) -> Codec:
        codec = self.codec if self._warms is None else self._warms.at(self._w.step)
        return codec_for_span(codec, span, self._w.flat.slots)

    def _check(self, vector: Tensor, span: Span) -> None:
        """Refuse NaN and infinity, which a codec might hide; if the sum is finite there are none of them."""
        if torch.isfinite(vector[span.start : span.stop].sum()):
            return
        for slot in self._w.flat.slots:
            group, start, stop = slot.span
            if group == span.group and start < span.stop and span.start < stop:
                found = vector[max(start, span.start) : min(stop, span.stop)]
                if not bool(found.isfinite().all()):
                    value = float(found[~found.isfinite()][0])
                    raise Diverged(self._w.rank, self._w.step, value, f"a number to be sent for {slot.name}")

    @property
    def remembers(self) -> bool:
        """Whether the codec has a memory."""
        return any(memory is not None for memory in self.memory)

    def has_left(self, span: Span) -> bool:
        """Whether a number of this span has not been sent yet."""
        memory = self.memory[span.group]
        return memory is not None and bool(_first(memory)[span.start : span.stop].any())

    @torch.no_grad()
    def take_back(self, span: Span, payload: Payload) -> None:
        """Add a payload that was not applied to the memory again, so that it is sent with the next one."""
        memory = self.memory[span.group]
        if memory is not None:
            row = _first(memory)[span.start : span.stop]
            lost = torch.empty_like(row)
            codec_for_span(self.codec, span, self._w.flat.slots).decode(payload, lost)
            row.add_(lost)

    def state(self) -> Saved:
        """The memory by parameter; empty if there is none."""
        memories = [memory for memory in self.memory if memory is not None]
        return named(self._w.flat.slots, memories) if memories else {}

    def inherit(self, saved: Sequence[Saved]) -> None:
        """Add the saved memories of some workers to this one; refused if this codec has no place for them."""
        mine = self.state()
        for one in saved:
            refuse_lost({f"memory/{name}": value for name, value in one.items() if name not in mine})
            if mine:
                add(self._w.flat.slots, [memory for memory in self.memory if memory is not None], one)


def _first(memory: Tensor) -> Tensor:
    """The row of a memory that holds what has not been sent yet."""
    return memory if memory.dim() == 1 else memory[0]
