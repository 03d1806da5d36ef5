"""By layer: each parameter is encoded separately, and small ones by another codec.

    payload = small(x) if x has fewer than `least` numbers else codec(x)

A fraction, a scale or a norm then belongs to one parameter. Small parameters (biases, say) are few bytes, so they may
as well be sent unchanged.

If a payload of a small parameter is taken back (`Encoder.take_back`), its numbers wait in the memory of the codec for
large ones and are sent with the next payload.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from manyhands.codecs.feedback import Feedback
from manyhands.codecs.half import Half
from manyhands.codecs.onebit import OneBit
from manyhands.codecs.raw import Raw
from manyhands.codecs.topk import TopK
from manyhands.codecs.wrapping import encode_at, refuse_warmup, scale_of
from manyhands.core.codec import Codec, CodecTraits, most_bytes, shares
from manyhands.core.errors import refuse_unless


@dataclass(frozen=True)
class ByLayer:
    """A codec for large parameters and one for small ones.

    Args:
        codec: for large ones.
        least: how many numbers a large one has.
        small: for small ones. Beside dgc() they need momentum too: dgc(topk(1.0), masking=false).
    """

    codec: Codec
    least: int = 0
    small: Codec = field(default_factory=Raw)
    by_parameter: ClassVar[bool] = True

    def __post_init__(self) -> None:
        refuse_unless(self.least >= 0, "least", self.least, ">= 0")
        large, small = (one.memory(torch.empty(1)) for one in (self.codec, self.small))
        same = small is None or (large is not None and large.shape == small.shape)
        refuse_unless(same, "small", self.small, "one that remembers as much as the codec, or nothing")
        refuse_warmup(self.codec, self.small)

    @property
    def traits(self) -> CodecTraits:
        """Those of either codec; unbiased if both are."""
        one, two = self.codec.traits, self.small.traits
        unbiased = one.unbiased and two.unbiased
        return replace(one, random=one.random or two.random, unbiased=unbiased, varies=one.varies or two.varies)

    @property
    def shared(self) -> bool:
        """Whether one of the two codecs asks for a common scale."""
        return shares(self.codec) or shares(self.small)

    def memory(self, like: Tensor) -> Tensor | None:
        """That of the codec for large parameters."""
        return self.codec.memory(like)

    def encode(self, x: Tensor, memory: Tensor | None) -> tuple[Tensor, ...]:
        """The payload of the codec for parameters of this size."""
        codec, own = self._with_memory(x, memory)
        return codec.encode(x, own)

    def scale(self, x: Tensor, memory: Tensor | None) -> Tensor:
        """The scale of the codec for parameters of this size."""
        codec, own = self._with_memory(x, memory)
        return scale_of(codec, x, own)

    def encode_at(self, x: Tensor, memory: Tensor | None, scale: Tensor) -> tuple[Tensor, ...]:
        """Like `encode`, with a given scale."""
        codec, own = self._with_memory(x, memory)
        return encode_at(codec, x, own, scale)

    def _with_memory(self, x: Tensor, memory: Tensor | None) -> tuple[Codec, Tensor | None]:
        """The codec for parameters of this size and its memory; one without a memory gets feedback around it."""
        codec = self._codec_for(x)
        if codec is self.codec or memory is None or codec.memory(x) is not None:
            return codec, memory
        return Feedback(codec), memory if memory.dim() == x.dim() else memory[0]

    def decode(self, payload: Sequence[Tensor], out: Tensor) -> None:
        """Decode by the codec for parameters of this size."""
        self._codec_for(out).decode(payload, out)

    def nbytes(self, like: Tensor) -> int:
        """The bytes of the codec for parameters of this size."""
        return self._codec_for(like).nbytes(like)

    def most(self, like: Tensor) -> int:
        """The largest number of bytes of that codec."""
        return most_bytes(self._codec_for(like), like)

    def _codec_for(self, x: Tensor) -> Codec:
        return self.small if x.numel() < self.least else self.codec


EXAMPLES: Mapping[str, Codec] = {
    "by layer": ByLayer(OneBit(), least=50),
    "by layer with feedback": ByLayer(Feedback(TopK(0.1)), least=50, small=Half()),
}
