"""Top-k: send only the largest numbers and their indices.

    payload = (i, x[i]) for the k = ceil(fraction * numel) largest |x|          decode: zeros, then out[i] = x[i]

Of equal magnitudes the first one is sent, and indices ascend, so every machine selects the same.

Reference: A. Aji, K. Heafield, "Sparse Communication for Distributed Gradient Descent", 2017,
https://arxiv.org/abs/1704.05021. Biased: use it inside `Feedback`, or most coordinates never move.

Where we differ: the k largest numbers are found exactly, not estimated from a sample (`SampledTopK` does that).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil
from typing import ClassVar

from torch import Tensor

from manyhands.codecs.payload import pairs_in, write_at
from manyhands.codecs.vector_kernels import largest
from manyhands.core.codec import Codec, CodecTraits
from manyhands.core.errors import Refused, refuse_unless


@dataclass(frozen=True)
class TopK:
    """The largest numbers only.

    Args:
        fraction: k / numel, rounded up to the next whole k.
    """

    fraction: float = 0.01
    by_parameter: ClassVar[bool] = False
    traits: ClassVar[CodecTraits] = CodecTraits()

    def __post_init__(self) -> None:
        refuse_unless(0 < self.fraction <= 1, "fraction", self.fraction, "> 0 and <= 1")

    def memory(self, like: Tensor) -> None:
        """No memory; `Feedback` around it remembers what was not sent."""
        return None

    def encode(self, x: Tensor, memory: Tensor | None) -> tuple[Tensor, ...]:
        """Indices (int32, ascending) and their values."""
        check_length(x)
        return largest(x.detach().reshape(-1), kept(self.fraction, x.numel()))

    def decode(self, payload: Sequence[Tensor], out: Tensor) -> None:
        """Zeros, with the values at their indices."""
        k = kept(self.fraction, out.numel())
        indices, values = pairs_in(payload, out, k, k)
        write_at(indices, values, out.zero_())

    def pairs(self, payload: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The payload itself is the pair of indices and values."""
        indices, values = payload
        return indices, values

    def with_fraction(self, fraction: float) -> TopK:
        """The same codec with another fraction."""
        return replace(self, fraction=fraction)

    def nbytes(self, like: Tensor) -> int:
        """An index and a value for each number that is sent."""
        return kept(self.fraction, like.numel()) * (4 + like.element_size())


def kept(fraction: float, numel: int) -> int:
    """k, from the decimal digits of the fraction, since in floats 0.07 * 100 is more than 7."""
    return ceil(Fraction(str(fraction)) * numel)


def check_length(x: Tensor) -> None:
    """Refuse a vector that is too long for int32 indices."""
    if x.numel() >= 2**31:
        raise Refused(f"the length of a vector is {x.numel()}, but must be < 2**31 (indices travel as int32)")


EXAMPLES: Mapping[str, Codec] = {"top 1%": TopK(0.01), "top 30%": TopK(0.3), "top 100%": TopK(1.0)}
