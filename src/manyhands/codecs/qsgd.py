"""QSGD: round each number to one of a few levels of its neighbours' norm, up or down so that the mean is right.

    n = ||v||          of a bucket of d neighbours, the l2-norm or the largest |v|
    r = s |v| / n      l = floor(r)
    level = l + Bernoulli(r - l)
    decoded = n sign(v) level / s             E[decoded] = v,  E ||decoded - v||^2 <= min(d / s^2, sqrt(d) / s) ||v||^2

The code of a number is s + sign(v) level, of 2, 4 or 8 bits for s <= 1, 7, 127; neighbours share a byte, the first in
its lowest bits. `Elias` is the smaller code of the paper.

        v = 3 -4 0 0    s = 4    n = 5    r = 2.4 3.2 0 0    levels 2 or 3, 3 or 4, 0, 0

Reference: D. Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding", 2017,
https://arxiv.org/abs/1610.02132.

Where we differ: of a bucket whose squares are too small or too large to be summed (n < 1e-9 or > 1e15) n is the largest
|v|, which is as right on the average. What is less than 1e-30 counts as 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from manyhands.codecs.native import dequantise, quantise
from manyhands.codecs.noise import seeds
from manyhands.codecs.payload import check_scales, check_spare, expect, row, row_of, wide
from manyhands.core.errors import BadPayload, refuse_unless

WIDTHS = {1: 2, 7: 4, 127: 8}
"""How many bits a number has, by the highest level."""


@dataclass(frozen=True)
class Qsgd:
    """A few bits for each number.

    Args:
        levels: s.
        bucket: d.
        norm: "l2", or "max", which rounds less and sends more that is not 0.
    """

    levels: int = 7
    bucket: int = 512
    norm: Literal["l2", "max"] = "l2"
    by_parameter: ClassVar[bool] = False

    def __post_init__(self) -> None:
        refuse_unless(1 <= self.levels <= 127, "levels", self.levels, ">= 1 and <= 127")
        refuse_unless(self.bucket >= 1, "bucket", self.bucket, ">= 1")
        refuse_unless(self.norm in ("l2", "max"), "norm", self.norm, "l2 or max")

    @property
    def bits(self) -> int:
        """Of a number on the wire."""
        return next(bits for levels, bits in WIDTHS.items() if self.levels <= levels)

    def memory(self, like: Tensor) -> None:
        """Nothing: what is lost now is made up for on the average."""
        return None

    def encode(self, x: Tensor, memory: Tensor | None) -> tuple[Tensor, ...]:
        """Packed codes, and the norm of every bucket."""
        return self.coded(x, self.bits)

    def coded(self, x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
        """The same with so many bits per number."""
        x = row(x)
        if not x.numel():
            return torch.empty(0, dtype=torch.uint8), x
        return quantise(x, self.bucket, self.norm, self.levels, bits, seeds())

    def decode(self, payload: Sequence[Tensor], out: Tensor) -> None:
        """Levels of the norms."""
        numel, bits = out.numel(), self.bits
        kinds = (-(-numel * bits // 8), torch.uint8), (self.buckets(numel), wide(out.dtype))
        codes, norms = expect(payload, *kinds)
        self.write(codes, norms, bits, out)

    def write(self, codes: Tensor, norms: Tensor, bits: int, out: Tensor) -> None:
        """What codes of so many bits stand for."""
        check_scales(norms)
        check_spare(codes, out.numel(), bits, self.levels)
        with row_of(out) as plain:
            if not dequantise(codes, self.bucket, norms, self.levels, bits, plain):
                raise BadPayload(f"a code of more than {2 * self.levels} came")

    def nbytes(self, like: Tensor) -> int:
        """A few bits per number and a norm per bucket."""
        return -(-like.numel() * self.bits // 8) + self.buckets(like.numel()) * wide(like.dtype).itemsize

    def buckets(self, numel: int) -> int:
        """How many norms there are."""
        return -(-numel // self.bucket)
