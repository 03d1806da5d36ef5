"""TernGrad: send -1, 0 or 1 for each number and one scale, so that the mean is right.

    c = clip * σ                              σ: the standard deviation of all numbers of a parameter
    g <- clamp(g, -c, c)
    s = max |g|                               b ~ Bernoulli(|g| / s)
    decoded = s sign(g) b                     E[decoded] = g after clipping, variance s |g| - g^2

Two bits per number, four neighbours in a byte, the first in the lowest bits: 0 for -1, 1 for 0, 2 for 1.

        1 -1  0  1 | -1             codes  2 0 1 2 | 0 1 1 1          bytes  146, 84

With one scale for all workers, the largest of theirs, what P of them send adds up to one of 2P + 1 levels, and every
worker's is still right on the average. The price is a small message before each one, and more chance: the variance of a
worker with a smaller scale s_k grows from s_k |g| - g^2 to s |g| - g^2.

        s_0 = 2, s_1 = 3        s = 3         decoded -3 0 3  +  -3 0 3        sum  -6 -3 0 3 6

Reference: W. Wen et al., "TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning", 2017,
https://arxiv.org/abs/1705.07878.

Where we differ: a scale is shared only if asked for; each worker clips by its own σ all the same. Numbers that are all
alike (σ less than a hundredth of their mean) are not clipped, or little would be left of them. A parameter of which
there is only a stretch has a scale for that stretch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt
from typing import ClassVar

import torch
from torch import Tensor

from manyhands.codecs.native import dequantise, moments, ternary
from manyhands.codecs.noise import seeds
from manyhands.codecs.payload import check_scales, check_spare, expect, no_scale, row, row_of, wide
from manyhands.core.errors import BadPayload, refuse_unless


@dataclass(frozen=True)
class TernGrad:
    """The signs of some numbers.

    Args:
        clip: c / σ; 0: nothing is clipped, and decoded numbers are right on the average.
        shared: whether all workers have one scale, where they sum at the same time.
    """

    clip: float = 2.5
    shared: bool = False
    by_parameter: ClassVar[bool] = True

    def __post_init__(self) -> None:
        refuse_unless(self.clip >= 0, "clip", self.clip, ">= 0")

    def memory(self, like: Tensor) -> None:
        """Nothing: what is lost now is made up for on the average."""
        return None

    def scale(self, x: Tensor, memory: Tensor | None) -> Tensor:
        """s."""
        if not x.numel() or x.is_meta:
            return no_scale(x)
        x = row(x)
        sums, most = moments(x)
        mean, square = (sums.double().sum(0) / x.numel()).tolist()
        variance = square - mean * mean
        clips = 0 < self.clip < inf and 1e-4 * mean * mean < variance < inf
        return torch.tensor([min(most, self.clip * sqrt(variance)) if clips else most], dtype=x.dtype)

    def encode(self, x: Tensor, memory: Tensor | None) -> tuple[Tensor, ...]:
        """Packed codes, and the scale."""
        s = self.scale(x, None)
        return self._encode(row(x), s, limit=float(s))

    def encode_at(self, x: Tensor, memory: Tensor | None, scale: Tensor) -> tuple[Tensor, ...]:
        """The same with a scale that is not less than the own one."""
        limit = float(self.scale(x, None)) if 0 < self.clip < inf else inf
        return self._encode(row(x), scale.detach().to("cpu", wide(x.dtype)).reshape(1), limit)

    def _encode(self, x: Tensor, s: Tensor, limit: float) -> tuple[Tensor, ...]:
        codes = ternary(x, s, limit, seeds()) if x.numel() else torch.empty(0, dtype=torch.uint8)
        return codes, s

    def decode(self, payload: Sequence[Tensor], out: Tensor) -> None:
        """The scale, its opposite or 0."""
        codes, s = expect(payload, (-(-out.numel() // 4), torch.uint8), (1, wide(out.dtype)))
        check_scales(s)
        check_spare(codes, out.numel(), 2, 1)
        with row_of(out) as plain:
            if not dequantise(codes, max(1, plain.numel()), s, 1, 2, plain):
                raise BadPayload("a code of 3 came, but must be 0 to 2")

    def nbytes(self, like: Tensor) -> int:
        """Two bits per number, and the scale."""
        return -(-like.numel() // 4) + wide(like.dtype).itemsize
