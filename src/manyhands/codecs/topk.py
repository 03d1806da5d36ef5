"""Top-k: send only the largest numbers and where they stand.

    payload = (i, x[i]) for the k = ceil(fraction * numel) largest |x|          decode: zeros, then out[i] = x[i]

Of equal magnitudes the first one goes, and indices ascend, so every machine picks the same. A NaN counts as infinite:
it travels, and divergence is seen.

Reference: A. Aji, K. Heafield, "Sparse Communication for Distributed Gradient Descent", 2017,
https://arxiv.org/abs/1704.05021. Biased: use it inside `Feedback`, or most coordinates never move.

Where we differ: k is exact and taken over the whole vector it is given, not estimated from a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

import torch
from torch import Tensor

from manyhands.codecs.native import largest
from manyhands.core.errors import refuse_unless


@dataclass(frozen=True)
class TopK:
    """The largest numbers only.

    Args:
        fraction: k / numel, rounded up to the next whole k.
    """

    fraction: float = 0.01

    def __post_init__(self) -> None:
        refuse_unless(0 < self.fraction <= 1, "fraction", self.fraction, "> 0 and <= 1")

    def memory(self, like: Tensor) -> None:
        """Nothing; wrap it in `Feedback` to remember what was not sent."""
        return None

    def encode(self, x: Tensor, memory: Tensor | None) -> tuple[Tensor, ...]:
        """Indices (int32, ascending) and their values."""
        refuse_unless(x.numel() < 2**31, "the length of a vector", x.numel(), "< 2**31 (indices travel as int32)")
        return largest(x.reshape(-1), self.kept(x.numel()))

    def decode(self, payload: Sequence[Tensor], out: Tensor) -> None:
        """Zeros with the values in their places."""
        indices, values = payload
        out.zero_().view(-1).index_copy_(0, indices.long(), values)

    def nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """An index and a value for each number kept."""
        return self.kept(numel) * (4 + dtype.itemsize)

    def kept(self, numel: int) -> int:
        """k; the fraction is taken as it was written, since in floats 0.07 * 100 is more than 7."""
        return ceil(Fraction(str(self.fraction)) * numel)
