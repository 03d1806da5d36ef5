"""QSGD: round each number to one of a few levels of its bucket's norm, up or down such that the mean is unbiased.

    n = ||v||          of a bucket of d neighbours, the l2-norm or the largest |v|
    r = s |v| / n      l = floor(r)
    level = l + Bernoulli(r - l)
    decoded = n sign(v) level / s             E[decoded] = v,  E ||decoded - v||^2 <= min(d / s^2, sqrt(d) / s) ||v||^2

The code of a number is s + sign(v) level, of 2, 4 or 8 bits for s <= 1, 7, 127; neighbours share a byte, the first one
in its lowest bits. `Elias` is the smaller code of the paper.

        v = 3 -4 0 0    s = 4    n = 5    r = 2.4 3.2 0 0    levels 2 or 3, 3 or 4, 0, 0

Reference: D. Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding", 2017,
https://arxiv.org/abs/1610.02132.

Where we differ: if the squares of a bucket are too small or too large to be summed (n < 1e-9 or > 1e15), n is the
largest |v|, which is unbiased as well. A norm below 1e-30 counts as 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from manyhands.codecs.noise import seeds
from manyhands.codecs.payload import check_scales, check_spare, expect, row, row_of, wide
from manyhands.codecs.vector_kernels import dequantise, quantise
from manyhands.core.codec import Codec, CodecTraits
from manyhands.core.errors import BadPayload, refuse_unless

WIDTHS = {1: 2, 7: 4, 127: 8}
"""Bits of a code, by the highest level that fits."""


@dataclass(frozen=True)
class Qsgd:
    """A few bits for each number.

    Args:
        levels: s.
        bucket: d.
        norm: "l2", or "max", which has a smaller rounding error and fewer zeros.
    """

    levels: int = 7
    bucket: int = 512
    norm: Literal["l2", "max"] = "l2"
    by_parameter: ClassVar[bool] = False
    traits: ClassVar[CodecTraits] = CodecTraits(random=True, unbiased=True)

    def __post_init__(self) -> None:
        refuse_unless(1 <= self.levels <= 127, "levels", self.levels, ">= 1 and <= 127")
        refuse_unless(self.bucket >= 1, "bucket", self.bucket, ">= 1")
        refuse_unless(self.norm in ("l2", "max"), "norm", self.norm, "l2 or max")

    @property
    def _bits(self) -> int:
        """Bits of a code in a payload."""
        return next(bits for levels, bits in WIDTHS.items() if self.levels <= levels)

    def memory(self, like: Tensor) -> None:
        """No memory: rounding errors average out."""
        return None

    def encode(self, x: Tensor, memory: Tensor | None) -> tuple[Tensor, ...]:
        """Packed codes, and the norm of every bucket."""
        return to_codes(self, x, self._bits)

    def decode(self, payload: Sequence[Tensor], out: Tensor) -> None:
        """The levels, times the norm of their bucket / s."""
        numel, bits = out.numel(), self._bits
        kinds = (-(-numel * bits // 8), torch.uint8), (bucket_count(self, numel), wide(out.dtype))
        codes, norms = expect(payload, *kinds)
        from_codes(self, codes, norms, bits, out)

    def nbytes(self, like: Tensor) -> int:
        """A few bits per number and a norm per bucket."""
        return -(-like.numel() * self._bits // 8) + bucket_count(self, like.numel()) * wide(like.dtype).itemsize


# -- shared with Elias, which has another code for the same levels --------------------------------------


def to_codes(codec: Qsgd, x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The codes of all numbers, of so many bits each, and the norm of every bucket."""
    x = row(x)
    if not x.numel():
        return torch.empty(0, dtype=torch.uint8), x
    return quantise(x, codec.bucket, codec.norm, codec.levels, bits, seeds())


def from_codes(codec: Qsgd, codes: Tensor, norms: Tensor, bits: int, out: Tensor) -> None:
    """Write the numbers into `out` that codes of so many bits stand for."""
    check_scales(norms)
    check_spare(codes, out.numel(), bits, codec.levels)
    with row_of(out) as plain:
        if not dequantise(codes, codec.bucket, norms, codec.levels, bits, plain):
            raise BadPayload(f"a code is larger than {2 * codec.levels}")


def bucket_count(codec: Qsgd, numel: int) -> int:
    """The number of buckets, each of which has a norm."""
    return -(-numel // codec.bucket)


EXAMPLES: Mapping[str, Codec] = {
    "qsgd": Qsgd(),
    "qsgd of 1 level": Qsgd(1, bucket=64, norm="max"),
    "qsgd of 127 levels": Qsgd(127, bucket=100),
}
