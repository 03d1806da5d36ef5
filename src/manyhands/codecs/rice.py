"""Rice: the indices of a threshold codec as gaps, in a Rice code whose parameter fits their mean.

    gap g (numbers between two indices)           g >> k ones, a zero, the lowest k bits of g;  then 1 if negative

    M = ceil(ln(2 - p) / -ln(1 - p))              the best divisor if a fraction p is sent, about 0.69 / p
    k = log2 M, rounded                           so the quotient g / M is g >> k

        k = 3      3: 0 011      6: 0 110      0: 0 000      28: 1110 100

Reference: N. Strom, "Scalable Distributed DNN Training Using Commodity GPU Cloud Computing", 2015,
https://www.isca-archive.org/interspeech_2015/strom15_interspeech.html; the divisor: R. Gallager, D. van Voorhis,
"Optimal Source Codes for Geometrically Distributed Integer Alphabets", 1975, https://doi.org/10.1109/TIT.1975.1055357.

Where we differ: p is the fraction of this payload, which the decoder knows from its count, so k is not sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, log, log2
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from manyhands.codecs.payload import expect
from manyhands.codecs.streams import (
    Bits,
    Whole,
    chain,
    check_end,
    from_bytes,
    interleaved,
    to_bytes,
    windows,
    written,
)
from manyhands.codecs.strom import USUAL, Strom, write_words
from manyhands.core.codec import Codec, CodecTraits
from manyhands.core.errors import BadPayload


@dataclass(frozen=True)
class Rice:
    """A few bits for each number that is sent.

    Args:
        codec: selects them, and remembers the rest.
    """

    codec: Strom
    by_parameter: ClassVar[bool] = False
    traits: ClassVar[CodecTraits] = CodecTraits(varies=True)

    def memory(self, like: Tensor) -> Tensor:
        """r of the codec inside."""
        return self.codec.memory(like)

    def encode(self, x: Tensor, memory: Tensor | None) -> tuple[Tensor, ...]:
        """The count of the numbers that are sent, and the bit stream."""
        words = self.codec.encode(x, memory)[0].numpy().astype(np.int64)
        gaps = np.diff(words >> 1, prepend=-1) - 1
        bits = coded(gaps, words & 1, parameter(len(words), x.numel()))
        return torch.tensor([len(words)], dtype=torch.int32), to_bytes(bits)

    def decode(self, payload: Sequence[Tensor], out: Tensor) -> None:
        """τ or -τ at the indices, 0 elsewhere."""
        length = payload[1].numel() if len(payload) > 1 else 0
        count, stream = expect(payload, (1, torch.int32), (length, torch.uint8))
        numel, many = out.numel(), int(count)
        if not 0 <= many <= numel:
            raise BadPayload(f"the count is {many}, but must be >= 0 and <= {numel}")
        gaps, negative = decoded(from_bytes(stream), many, parameter(many, numel))
        indices = np.cumsum(gaps + 1) - 1
        if many and indices[-1] >= numel:
            raise BadPayload(f"an index is {indices[-1]}, but must be < {numel}")
        write_words(torch.from_numpy((2 * indices + negative).astype(np.int32)), self.codec.threshold, out)

    def nbytes(self, like: Tensor) -> int:
        """An estimate: as if one of a hundred numbers were sent."""
        count = int(like.numel() * USUAL)
        return 4 + ceil(count * (parameter(count, like.numel()) + 3) / 8)

    def most(self, like: Tensor) -> int:
        """Two bits for each number, as if all were sent: the code of fewer numbers is not longer."""
        return 4 + -(-like.numel() // 4)


def parameter(count: int, numel: int) -> int:
    """k, if `count` of the numbers are sent."""
    p = count / numel if numel else 0
    return round(log2(divisor(p))) if 0 < p < 1 else 0


def divisor(p: float) -> int:
    """M, for 0 < p < 1."""
    return ceil(log(2 - p) / -log(1 - p))


def coded(gaps: Whole, negative: Whole, k: int) -> Bits:
    """The bit stream of gaps and signs."""
    ones, one = np.full_like(gaps, -1), np.ones_like(gaps)
    codes = interleaved(ones, gaps & (2**k - 1), negative)
    return written(codes, interleaved(gaps >> k, (1 + k) * one, one))


def decoded(bits: Bits, count: int, k: int) -> tuple[Whole, Whole]:
    """The gaps and signs of a bit stream."""
    length = len(bits)
    zeros = np.where(bits == 0, np.arange(length), length)
    zero = np.minimum.accumulate(zeros[::-1])[::-1]  # of each bit the next one that is 0
    where, end = chain(zero + k + 2, count)
    if len(where) < count or end > length:
        raise BadPayload(f"a stream of {length} bits ends before the last of its {count} numbers")
    check_end(bits, end)
    zero = zero[where]
    low = windows(bits)[zero] >> (31 - k) & (2**k - 1)
    return (zero - where << k) + low, bits[zero + 1 + k].astype(np.int64)


EXAMPLES: Mapping[str, Codec] = {"threshold, rice": Rice(Strom(0.7))}
