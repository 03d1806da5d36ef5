"""Fixed point: round each number to a multiple of a small step, up or down so that the mean is right.

    <IL, FL>     ε = 2^-FL, from -2^(IL-1) to 2^(IL-1) - ε
    payload      floor(x / ε) + Bernoulli(x / ε - floor(x / ε)), and the nearest there is beyond the ends

        <2, 2>    0.3 -> 0.25 or, with probability 0.2, 0.5        5 -> 1.75
                 -0.3 -> -0.25 or, with probability 0.2, -0.5     -9 -> -2

Reference: S. Gupta et al., "Deep Learning with Limited Numerical Precision", 2015, https://arxiv.org/abs/1502.02551.

Where we differ: only what travels is rounded; weights and sums stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from manyhands.codecs import noise
from manyhands.codecs.fallback import STRETCH
from manyhands.codecs.payload import expect, row, row_of
from manyhands.core.errors import BadPayload, refuse_unless


@dataclass(frozen=True)
class Fixed:
    """One or two bytes per number.

    Args:
        integer: IL, the sign counts.
        fraction: FL; the two together make 16 bits at most, and fit into one byte if they are 8.
    """

    integer: int = 2
    fraction: int = 14
    by_parameter: ClassVar[bool] = False

    def __post_init__(self) -> None:
        refuse_unless(self.integer >= 1, "integer", self.integer, ">= 1")
        refuse_unless(self.fraction >= 0, "fraction", self.fraction, ">= 0")
        width = self.integer + self.fraction
        refuse_unless(2 <= width <= 16, "integer + fraction", width, ">= 2 and <= 16")

    @property
    def dtype(self) -> torch.dtype:
        """What travels."""
        return torch.int8 if self.integer + self.fraction <= 8 else torch.int16

    @property
    def highest(self) -> int:
        """The largest multiple of ε there is; one more is the smallest."""
        return (1 << (self.integer + self.fraction - 1)) - 1

    def memory(self, like: Tensor) -> None:
        """Nothing: what is lost now is made up for on the average."""
        return None

    def encode(self, x: Tensor, memory: Tensor | None) -> tuple[Tensor, ...]:
        """Multiples of ε."""
        out, x, seeds = torch.empty(x.numel(), dtype=self.dtype), row(x), noise.seeds()
        for start in range(0, x.numel(), STRETCH):
            y = (x[start : start + STRETCH] * 2.0**self.fraction).clamp_(-self.highest - 1, self.highest).numpy()
            whole = noise.rounded(y, noise.uniform(seeds, start, len(y)))
            out[start : start + STRETCH] = torch.from_numpy(whole.astype(np.int16))
        return (out,)

    def decode(self, payload: Sequence[Tensor], out: Tensor) -> None:
        """Times ε."""
        (whole,) = expect(payload, (out.numel(), self.dtype))
        if whole.numel() and not -self.highest - 1 <= int(whole.min()) <= int(whole.max()) <= self.highest:
            raise BadPayload(f"{int(whole.min())} to {int(whole.max())} came, but must be within {self.highest}")
        with row_of(out) as plain:
            torch.mul(whole, 2.0**-self.fraction, out=plain)

    def nbytes(self, like: Tensor) -> int:
        """One or two per number."""
        return like.numel() * self.dtype.itemsize
