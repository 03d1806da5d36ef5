"""Fixed point: round each number to a multiple of a small step, up or down such that the mean is unbiased.

    <IL, FL>     ε = 2^-FL, from -2^(IL-1) to 2^(IL-1) - ε
    payload      floor(x / ε) + Bernoulli(x / ε - floor(x / ε)), clamped to that range

        <2, 2>    0.3 -> 0.25 or, with probability 0.2, 0.5        5 -> 1.75
                 -0.3 -> -0.25 or, with probability 0.2, -0.5     -9 -> -2

Reference: S. Gupta et al., "Deep Learning with Limited Numerical Precision", 2015, https://arxiv.org/abs/1502.02551.

Where we differ: only payloads are rounded; weights and sums are not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from manyhands.codecs import noise
from manyhands.codecs.fallback import CACHE_BLOCK
from manyhands.codecs.payload import expect, row, row_of
from manyhands.core.codec import Codec, CodecTraits
from manyhands.core.errors import BadPayload, refuse_unless


@dataclass(frozen=True)
class Fixed:
    """One or two bytes per number.

    Args:
        integer: IL, including the sign bit.
        fraction: FL; IL + FL is at most 16, and a number takes one byte if it is at most 8.
    """

    integer: int = 2
    fraction: int = 14
    by_parameter: ClassVar[bool] = False
    traits: ClassVar[CodecTraits] = CodecTraits(random=True, unbiased=True)

    def __post_init__(self) -> None:
        refuse_unless(self.integer >= 1, "integer", self.integer, ">= 1")
        refuse_unless(self.fraction >= 0, "fraction", self.fraction, ">= 0")
        width = self.integer + self.fraction
        refuse_unless(2 <= width <= 16, "integer + fraction", width, ">= 2 and <= 16")

    @property
    def _dtype(self) -> torch.dtype:
        """The dtype of a payload."""
        return torch.int8 if self.integer + self.fraction <= 8 else torch.int16

    @property
    def _highest(self) -> int:
        """The largest multiple of ε in the range; the smallest one is -(this + 1)."""
        return (1 << (self.integer + self.fraction - 1)) - 1

    def memory(self, like: Tensor) -> None:
        """No memory: rounding errors average out."""
        return None

    def encode(self, x: Tensor, memory: Tensor | None) -> tuple[Tensor, ...]:
        """The multiples of ε, as int8 or int16."""
        out, x, seeds = torch.empty(x.numel(), dtype=self._dtype), row(x), noise.seeds()
        for start in range(0, x.numel(), CACHE_BLOCK):
            y = (x[start : start + CACHE_BLOCK] * 2.0**self.fraction).clamp_(-self._highest - 1, self._highest).numpy()
            whole = noise.rounded(y, noise.uniform(seeds, start, len(y)))
            out[start : start + CACHE_BLOCK] = torch.from_numpy(whole.astype(np.int16))
        return (out,)

    def decode(self, payload: Sequence[Tensor], out: Tensor) -> None:
        """Multiply by ε."""
        (whole,) = expect(payload, (out.numel(), self._dtype))
        if whole.numel() and not -self._highest - 1 <= int(whole.min()) <= int(whole.max()) <= self._highest:
            low, high = int(whole.min()), int(whole.max())
            raise BadPayload(f"numbers are {low} to {high}, but must be >= {-self._highest - 1} and <= {self._highest}")
        with row_of(out) as plain:
            torch.mul(whole, 2.0**-self.fraction, out=plain)

    def nbytes(self, like: Tensor) -> int:
        """One or two bytes per number."""
        return like.numel() * self._dtype.itemsize


EXAMPLES: Mapping[str, Codec] = {"fixed": Fixed(4, 12), "fixed of one byte": Fixed(4, 3)}
