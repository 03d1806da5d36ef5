"""Top-k: send only the largest numbers and where they stand.

    payload = (i, x[i]) for the k = ceil(fraction * numel) largest |x|          decode: zeros, then out[i] = x[i]

Of equal magnitudes the first one goes, and indices ascend, so every machine picks the same.

Reference: A. Aji, K. Heafield, "Sparse Communication for Distributed Gradient Descent", 2017,
https://arxiv.org/abs/1704.05021. Biased: use it inside `Feedback`, or most coordinates never move.

Where we differ: k is exact and taken over the whole vector it is given, not estimated from a sample (`SampledTopK` does
that).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil
from typing import ClassVar

from torch import Tensor

from manyhands.codecs.native import largest
from manyhands.codecs.payload import pairs_in, place
from manyhands.core.errors import refuse_unless


@dataclass(frozen=True)
class TopK:
    """The largest numbers only.

    Args:
        fraction: k / numel, rounded up to the next whole k.
    """

    fraction: float = 0.01
    by_parameter: ClassVar[bool] = False

    def __post_init__(self) -> None:
        refuse_unless(0 < self.fraction <= 1, "fraction", self.fraction, "> 0 and <= 1")

    def memory(self, like: Tensor) -> None:
        """Nothing; wrap it in `Feedback` to remember what was not sent."""
        return None

    def encode(self, x: Tensor, memory: Tensor | None) -> tuple[Tensor, ...]:
        """Indices (int32, ascending) and their values."""
        check_length(x)
        return largest(x.detach().reshape(-1), self.kept(x.numel()))

    def decode(self, payload: Sequence[Tensor], out: Tensor) -> None:
        """Zeros with the values in their places."""
        k = self.kept(out.numel())
        indices, values = pairs_in(payload, out, k, k)
        place(indices, values, out.zero_())

    def pairs(self, payload: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Indices and values of a payload of ours."""
        indices, values = payload
        return indices, values

    def with_fraction(self, fraction: float) -> TopK:
        """The same with another fraction."""
        return replace(self, fraction=fraction)

    def nbytes(self, like: Tensor) -> int:
        """An index and a value for each number kept."""
        return self.kept(like.numel()) * (4 + like.element_size())

    def kept(self, numel: int) -> int:
        """k."""
        return kept(self.fraction, numel)


def kept(fraction: float, numel: int) -> int:
    """k; the fraction is taken as it was written, since in floats 0.07 * 100 is more than 7."""
    return ceil(Fraction(str(fraction)) * numel)


def check_length(x: Tensor) -> None:
    """Refuse a vector that an index cannot reach the end of."""
    refuse_unless(x.numel() < 2**31, "the length of a vector", x.numel(), "< 2**31 (indices travel as int32)")
