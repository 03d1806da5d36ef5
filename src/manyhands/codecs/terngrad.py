"""TernGrad: send -1, 0 or 1 for each number and one scale, such that the mean is unbiased.

    c = clip * σ                              σ: the standard deviation of all numbers of a parameter
    g <- clamp(g, -c, c)
    s = max |g|                               b ~ Bernoulli(|g| / s)
    decoded = s sign(g) b                     E[decoded] = g after clipping, variance s |g| - g^2

Two bits per number, four neighbours in a byte, the first in the lowest bits: 0 for -1, 1 for 0, 2 for 1.

        1 -1  0  1 | -1             codes  2 0 1 2 | 0 1 1 1          bytes  146, 84

With one scale for all workers, the largest of theirs, a sum of P payloads has 2P + 1 levels, and each of them is still
unbiased. The price is a small message before each exchange and a larger variance: that of a worker with a smaller scale
s_k grows from s_k |g| - g^2 to s |g| - g^2.

        s_0 = 2, s_1 = 3        s = 3         decoded -3 0 3  +  -3 0 3        sum  -6 -3 0 3 6

Reference: W. Wen et al., "TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning", 2017,
https://arxiv.org/abs/1705.07878.

Where we differ: the scale is shared only on request, and each worker clips by its own σ even then. Numbers that are
nearly equal (σ less than a hundredth of their mean) are not clipped, since almost all of them would be. A span that
holds only a part of a parameter has a scale for that part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from typing import ClassVar

import torch
from torch import Tensor

from manyhands.codecs.noise import seeds
from manyhands.codecs.payload import check_scales, check_spare, expect, no_scale, row, row_of, wide
from manyhands.codecs.vector_kernels import dequantise, moments, ternary
from manyhands.core.codec import Codec, CodecTraits
from manyhands.core.errors import BadPayload, refuse_unless


@dataclass(frozen=True)
class TernGrad:
    """The signs of some numbers.

    Args:
        clip: c / σ; 0: nothing is clipped, and decoded numbers are unbiased.
        shared: whether all workers use one scale; only for sums that all workers take part in.
    """

    clip: float = 2.5
    shared: bool = False
    by_parameter: ClassVar[bool] = True

    def __post_init__(self) -> None:
        refuse_unless(self.clip >= 0, "clip", self.clip, ">= 0")

    @property
    def traits(self) -> CodecTraits:
        """Clipping is a bias."""
        return CodecTraits(random=True, unbiased=not self.clip)

    def memory(self, like: Tensor) -> None:
        """No memory: rounding errors average out."""
        return None

    def scale(self, x: Tensor, memory: Tensor | None) -> Tensor:
        """s, from this worker's own numbers."""
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
        """The same with a scale that is at least the worker's own."""
        limit = float(self.scale(x, None)) if 0 < self.clip < inf else inf
        return self._encode(row(x), scale.detach().to("cpu", wide(x.dtype)).reshape(1), limit)

    def _encode(self, x: Tensor, s: Tensor, limit: float) -> tuple[Tensor, ...]:
        codes = ternary(x, s, limit, seeds()) if x.numel() else torch.empty(0, dtype=torch.uint8)
        return codes, s

    def decode(self, payload: Sequence[Tensor], out: Tensor) -> None:
        """The scale, its negative or 0."""
        codes, s = expect(payload, (-(-out.numel() // 4), torch.uint8), (1, wide(out.dtype)))
        check_scales(s)
        check_spare(codes, out.numel(), 2, 1)
        with row_of(out) as plain:
            if not dequantise(codes, max(1, plain.numel()), s, 1, 2, plain):
                raise BadPayload("a code is 3, but must be 0, 1 or 2")

    def nbytes(self, like: Tensor) -> int:
        """Two bits per number, and the scale."""
        return -(-like.numel() // 4) + wide(like.dtype).itemsize


EXAMPLES: Mapping[str, Codec] = {
    "ternary": TernGrad(clip=0),
    "ternary, clipped": TernGrad(),
    "ternary, shared scale": TernGrad(shared=True),
}
