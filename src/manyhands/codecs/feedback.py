"""Error feedback: the error of a payload is added to the next vector that is encoded.

    a = x + e                     e = 0 at first
    payload = C(a)
    e <- a - D(payload)           hence  sum of all D(payload) + e = sum of all x

Reference: F. Seide et al., "1-Bit Stochastic Gradient Descent", 2014,
https://www.isca-archive.org/interspeech_2014/seide14_interspeech.html; analysed by S. Karimireddy et al., "Error
Feedback Fixes SignSGD", 2019, https://arxiv.org/abs/1901.09847.

Where we differ: e has the units of x. If η changes during a run, send η g instead of g: otherwise earlier errors are
scaled by the new η.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from manyhands.codecs.half import Half
from manyhands.codecs.payload import write_at
from manyhands.codecs.topk import TopK
from manyhands.codecs.wrapping import encode_at, refuse_warmup, scale_of
from manyhands.core.codec import Codec, CodecTraits, Sparse, most_bytes, shares
from manyhands.core.errors import refuse_unless


@dataclass(frozen=True)
class Feedback:
    """A codec with a memory of its error.

    Args:
        codec: C and D.
    """

    codec: Codec

    def __post_init__(self) -> None:
        refuse_unless(self.codec.memory(torch.empty(0)) is None, "codec", self.codec, "one without a memory of its own")
        refuse_warmup(self.codec)

    @property
    def by_parameter(self) -> bool:
        """As the codec inside."""
        return self.codec.by_parameter

    @property
    def traits(self) -> CodecTraits:
        """Those of the codec inside; with a memory it is not unbiased."""
        return replace(self.codec.traits, unbiased=False, plain=False)

    @property
    def shared(self) -> bool:
        """As the codec inside."""
        return shares(self.codec)

    def memory(self, like: Tensor) -> Tensor:
        """e, the error of the last payload."""
        return torch.zeros_like(like)

    def encode(self, x: Tensor, memory: Tensor | None) -> tuple[Tensor, ...]:
        """C(x + e)."""
        assert memory is not None, "Feedback needs the memory that memory() gave"
        if isinstance(self.codec, Sparse):
            return self._encode_pairs(self.codec, x, memory)
        a = x + memory  # a new tensor: the payload may be `a` itself
        return self._keep_error(self.codec.encode(a, None), a, memory)

    def scale(self, x: Tensor, memory: Tensor | None) -> Tensor:
        """The scale of x + e."""
        return scale_of(self.codec, x if memory is None else x + memory, None)

    def encode_at(self, x: Tensor, memory: Tensor | None, scale: Tensor) -> tuple[Tensor, ...]:
        """C(x + e) with a given scale."""
        assert memory is not None, "Feedback needs the memory that memory() gave"
        a = x + memory
        return self._keep_error(encode_at(self.codec, a, None, scale), a, memory)

    def _keep_error(self, payload: tuple[Tensor, ...], a: Tensor, memory: Tensor) -> tuple[Tensor, ...]:
        """e <- a - D(payload)."""
        self.codec.decode(payload, memory)
        torch.sub(a, memory, out=memory)
        return payload

    def _encode_pairs(self, sparse: Sparse, x: Tensor, memory: Tensor) -> tuple[Tensor, ...]:
        """The same without a copy: a sparse codec sends a number unchanged (its error is 0) or not at all."""
        payload = self.codec.encode(memory.add_(x), None)
        write_at(sparse.pairs(payload)[0], 0.0, memory)
        return payload

    def decode(self, payload: Sequence[Tensor], out: Tensor) -> None:
        """D(payload)."""
        self.codec.decode(payload, out)

    def nbytes(self, like: Tensor) -> int:
        """As the codec inside."""
        return self.codec.nbytes(like)

    def most(self, like: Tensor) -> int:
        """As the codec inside."""
        return most_bytes(self.codec, like)


EXAMPLES: Mapping[str, Codec] = {"feedback(topk)": Feedback(TopK(0.1)), "feedback(half)": Feedback(Half())}
