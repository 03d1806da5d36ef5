"""Error feedback: what a codec loses now is added to what it sends next.

    a = x + e                     e = 0 at first
    payload = C(a)
    e <- a - D(payload)           hence  sum of all D(payload) + e = sum of all x

Reference: F. Seide et al., "1-Bit Stochastic Gradient Descent", 2014,
https://www.isca-archive.org/interspeech_2014/seide14_interspeech.html; analysed by S. Karimireddy et al., "Error
Feedback Fixes SignSGD", 2019, https://arxiv.org/abs/1901.09847.

Where we differ: e is kept in the units of x. Whoever changes η during a run should send η g instead of g, or old
remainders are scaled by the new η.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from manyhands.codecs.kinds import encode_at, scale_of, surround
from manyhands.codecs.payload import place
from manyhands.core.errors import refuse_unless
from manyhands.core.protocols import Codec, Sparse, shares


@dataclass(frozen=True)
class Feedback:
    """A codec with a memory of what it lost.

    Args:
        codec: C and D.
    """

    codec: Codec

    def __post_init__(self) -> None:
        refuse_unless(self.codec.memory(torch.empty(0)) is None, "codec", self.codec, "one without a memory of its own")
        surround(self, self.codec)

    @property
    def by_parameter(self) -> bool:
        """As the codec's."""
        return self.codec.by_parameter

    @property
    def shared(self) -> bool:
        """As the codec's."""
        return shares(self.codec)

    def memory(self, like: Tensor) -> Tensor:
        """e."""
        return torch.zeros_like(like)

    def encode(self, x: Tensor, memory: Tensor | None) -> tuple[Tensor, ...]:
        """What the codec makes of x and of all that it lost before."""
        assert memory is not None, "Feedback needs the memory that memory() gave"
        if isinstance(self.codec, Sparse):
            return self._encode_some(self.codec, x, memory)
        a = x + memory  # a new tensor: the payload may be `a` itself
        return self._without_what_is_sent(self.codec.encode(a, None), a, memory)

    def scale(self, x: Tensor, memory: Tensor | None) -> Tensor:
        """Of x and of all that was lost before."""
        return scale_of(self.codec, x if memory is None else x + memory, None)

    def encode_at(self, x: Tensor, memory: Tensor | None, scale: Tensor) -> tuple[Tensor, ...]:
        """The same as encode, with another scale."""
        assert memory is not None, "Feedback needs the memory that memory() gave"
        a = x + memory
        return self._without_what_is_sent(encode_at(self.codec, a, None, scale), a, memory)

    def _without_what_is_sent(self, payload: tuple[Tensor, ...], a: Tensor, memory: Tensor) -> tuple[Tensor, ...]:
        self.codec.decode(payload, memory)
        torch.sub(a, memory, out=memory)
        return payload

    def _encode_some(self, sparse: Sparse, x: Tensor, memory: Tensor) -> tuple[Tensor, ...]:
        """The same where numbers are sent as they are, or not at all: what is left is 0 there, and needs no copy."""
        payload = self.codec.encode(memory.add_(x), None)
        place(sparse.pairs(payload)[0], 0.0, memory)
        return payload

    def decode(self, payload: Sequence[Tensor], out: Tensor) -> None:
        """As the codec does."""
        self.codec.decode(payload, out)

    def nbytes(self, like: Tensor) -> int:
        """As the codec's."""
        return self.codec.nbytes(like)
