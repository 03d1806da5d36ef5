"""By layer: each parameter is encoded by itself, and small ones by another codec.

    payload = small(x) if x has fewer than `least` numbers else codec(x)

A fraction, a scale or a norm then belongs to one parameter. Small parameters (biases, say) are few bytes, so they may
as well go as they are.

What the codec remembers of a small parameter, because something sent for it has not been used, is sent with the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from manyhands.codecs.feedback import Feedback
from manyhands.codecs.kinds import encode_at, scale_of, surround
from manyhands.codecs.raw import Raw
from manyhands.core.errors import refuse_unless
from manyhands.core.protocols import Codec, shares


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
        rows, own = (one.memory(torch.empty(1)) for one in (self.codec, self.small))
        alike = own is None or (rows is not None and rows.shape == own.shape)
        refuse_unless(alike, "small", self.small, "one that remembers as much as the codec, or nothing")
        surround(self, self.codec, self.small)

    @property
    def shared(self) -> bool:
        """If one of the two asks for it."""
        return shares(self.codec) or shares(self.small)

    def memory(self, like: Tensor) -> Tensor | None:
        """The codec's own."""
        return self.codec.memory(like)

    def encode(self, x: Tensor, memory: Tensor | None) -> tuple[Tensor, ...]:
        """What one of the two makes of it."""
        codec, own = self._with_memory(x, memory)
        return codec.encode(x, own)

    def scale(self, x: Tensor, memory: Tensor | None) -> Tensor:
        """That one's."""
        codec, own = self._with_memory(x, memory)
        return scale_of(codec, x, own)

    def encode_at(self, x: Tensor, memory: Tensor | None, scale: Tensor) -> tuple[Tensor, ...]:
        """What that one makes of it."""
        codec, own = self._with_memory(x, memory)
        return encode_at(codec, x, own, scale)

    def _with_memory(self, x: Tensor, memory: Tensor | None) -> tuple[Codec, Tensor | None]:
        """The codec for something like this, around which there is feedback if it remembers nothing by itself."""
        codec = self.chosen(x)
        if codec is self.codec or memory is None or codec.memory(x) is not None:
            return codec, memory
        return Feedback(codec), memory if memory.dim() == x.dim() else memory[0]

    def decode(self, payload: Sequence[Tensor], out: Tensor) -> None:
        """As that one does."""
        self.chosen(out).decode(payload, out)

    def nbytes(self, like: Tensor) -> int:
        """As that one's."""
        return self.chosen(like).nbytes(like)

    def chosen(self, x: Tensor) -> Codec:
        """The codec for something like this."""
        return self.small if x.numel() < self.least else self.codec
