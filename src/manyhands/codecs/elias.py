"""Elias: QSGD with the paper's code for its levels, which is short if most levels are 0.

    for each nonzero level:   ω(distance from the previous one)   1 if it is negative, else 0   ω(|level|)

    ω(n)     write 0; while n > 1: write n in binary in front of it, and set n to its number of bits - 1
             1: 0    2: 100    3: 110    4: 101000    8: 1110000    16: 10100100000

    levels   2 -3 0 1            0 0 100   0 1 110   100 0 0

Reference: D. Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding", 2017,
https://arxiv.org/abs/1610.02132; P. Elias, "Universal Codeword Sets and Representations of the Integers", 1975,
https://doi.org/10.1109/TIT.1975.1055349.

Where we differ: distances are counted across buckets, so that there is one count of nonzero levels and not one per
bucket; the norms are a separate tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, sqrt
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from manyhands.codecs.payload import expect, wide
from manyhands.codecs.qsgd import Qsgd, bucket_count, from_codes, to_codes
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
from manyhands.core.codec import Codec, CodecTraits
from manyhands.core.errors import BadPayload

READ_BITS, MARGIN = 2**17, 128
"""Bits that are read at a time, and more bits than one item has."""


@dataclass(frozen=True)
class Elias:
    """A few bits for each level that is not 0.

    Args:
        codec: rounds to levels; with few levels and large buckets most of them are 0.
    """

    codec: Qsgd = field(default_factory=Qsgd)
    by_parameter: ClassVar[bool] = False
    traits: ClassVar[CodecTraits] = CodecTraits(random=True, unbiased=True, varies=True)

    def memory(self, like: Tensor) -> None:
        """No memory: rounding errors average out."""
        return None

    def encode(self, x: Tensor, memory: Tensor | None) -> tuple[Tensor, ...]:
        """The number of nonzero levels, the bit stream, and the norm of every bucket."""
        codes, norms = to_codes(self.codec, x, bits=8)
        levels = codes.numpy().astype(np.int64) - self.codec.levels
        return torch.tensor([np.count_nonzero(levels)], dtype=torch.int32), to_bytes(coded(levels)), norms

    def decode(self, payload: Sequence[Tensor], out: Tensor) -> None:
        """The levels, times the norm of their bucket / s."""
        numel, s = out.numel(), self.codec.levels
        length = payload[1].numel() if len(payload) > 1 else 0
        kinds = (1, torch.int32), (length, torch.uint8), (bucket_count(self.codec, numel), wide(out.dtype))
        count, stream, norms = expect(payload, *kinds)
        if not 0 <= int(count) <= numel:
            raise BadPayload(f"the number of nonzero levels is {int(count)}, but must be >= 0 and <= {numel}")
        indices, levels = decoded(from_bytes(stream), int(count))
        if len(levels) and (indices[-1] >= numel or np.abs(levels).max() > s):
            highest, last = np.abs(levels).max(), indices[-1]
            raise BadPayload(f"the highest level is {highest} and the last index {last}, but must be <= {s}, < {numel}")
        codes = np.full(numel, s, np.uint8)
        codes[indices] = levels + s
        from_codes(self.codec, torch.from_numpy(codes), norms, 8, out)

    def nbytes(self, like: Tensor) -> int:
        """An estimate from the paper's bound on the nonzero levels of a bucket, s (s + sqrt(d))."""
        s, d = self.codec.levels, self.codec.bucket
        part = min(1.0, s * (s + sqrt(d)) / d)
        each = 1 + int(omega(np.array([round(1 / part), ceil(s / 4)]))[1].sum())
        return self._header(like) + ceil(like.numel() * part * each / 8)

    def most(self, like: Tensor) -> int:
        """As if every number had the highest level."""
        each = 2 + int(omega(np.array([self.codec.levels]))[1].max())
        return self._header(like) + -(-like.numel() * each // 8)

    def _header(self, like: Tensor) -> int:
        """Bytes of the count and of the norms."""
        return 4 + bucket_count(self.codec, like.numel()) * wide(like.dtype).itemsize


def omega(n: Whole) -> tuple[Whole, Whole]:
    """The codes of numbers >= 1, and their lengths in bits."""
    codes, lengths = np.zeros(len(n), np.int64), np.ones(len(n), np.int64)
    while (n > 1).any():
        width = np.where(n > 1, np.frexp(n)[1], 0)
        codes |= np.where(n > 1, n << lengths, 0)
        lengths += width
        n = np.maximum(width - 1, 1)
    return codes, lengths


def omegas(bits: Bits) -> tuple[Whole, Whole]:
    """The number whose code begins at each bit, and the length of that code; 0 if it has more than 31 bits."""
    word, start = windows(bits), np.arange(len(bits))
    n, index = np.ones(len(bits), np.int64), start.copy()
    more = bits == 1
    while more.any():
        length = np.where(more, n + 1, 0)
        n = np.where(more, word[np.minimum(index, len(bits) - 1)] >> np.maximum(32 - length, 0), n)
        index += length
        n[length > 31] = 0
        more &= (length <= 31) & (index < len(bits)) & (bits[np.minimum(index, len(bits) - 1)] == 1)
    return n, index + 1 - start


def coded(levels: Whole) -> Bits:
    """The bit stream of signed levels."""
    (where,) = levels.nonzero()
    (gaps, a), (sizes, b) = omega(np.diff(where, prepend=-1)), omega(np.abs(levels[where]))
    signs = (levels[where] < 0).astype(np.int64)
    return written(interleaved(gaps, signs, sizes), interleaved(a, np.ones_like(a), b))


def decoded(bits: Bits, count: int) -> tuple[Whole, Whole]:
    """The indices of the nonzero levels, and the levels."""
    gaps, levels, index = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], 0
    while count:
        here = np.concatenate([bits[index : index + READ_BITS + MARGIN], np.zeros(MARGIN, np.uint8)])
        n, length = omegas(here)
        sign = np.minimum(np.arange(len(here)) + length, len(here) - 2)
        where, end = chain((sign + 1 + length[sign + 1])[:READ_BITS], count)
        gaps.append(n[where])
        levels.append(np.where(here[sign[where]] == 1, -n[sign[where] + 1], n[sign[where] + 1]))
        index, count = index + end, count - len(where)
        if index > len(bits) or not n[where].all() or not levels[-1].all():
            raise BadPayload("the bit stream ends before the last of its numbers, or holds a code that is too long")
    check_end(bits, index)
    return np.cumsum(np.concatenate(gaps)) - 1, np.concatenate(levels)


EXAMPLES: Mapping[str, Codec] = {"elias": Elias(Qsgd(3, bucket=200))}
