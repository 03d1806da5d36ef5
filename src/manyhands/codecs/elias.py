"""Elias: QSGD with the paper's code for its levels, most of which are 0 if there are few.

    for each number that is not 0:   ω(steps from the last such number)  1 if it is negative  ω(level)

    ω(n)     write 0; while n > 1: write n in front, in binary, and let n be one less than its number of bits
             1: 0    2: 100    3: 110    4: 101000    8: 1110000    16: 10100100000

    levels   2 -3 0 1            0 0 100   0 1 110   100 0 0

Reference: D. Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding", 2017,
https://arxiv.org/abs/1610.02132; P. Elias, "Universal Codeword Sets and Representations of the Integers", 1975,
https://doi.org/10.1109/TIT.1975.1055349.

Where we differ: steps go on from one bucket to the next, so that there is one number of levels and not one per bucket;
norms travel by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, sqrt
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from manyhands.codecs.payload import expect, wide
from manyhands.codecs.qsgd import Qsgd
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
from manyhands.core.errors import BadPayload

STRETCH, MARGIN = 2**17, 128
"""Bits that are read at a time, and more than one item has."""


@dataclass(frozen=True)
class Elias:
    """A few bits for each number that is not 0.

    Args:
        codec: what rounds; few levels and large buckets leave little.
    """

    codec: Qsgd = field(default_factory=Qsgd)
    by_parameter: ClassVar[bool] = False

    def memory(self, like: Tensor) -> None:
        """Nothing: what is lost now is made up for on the average."""
        return None

    def encode(self, x: Tensor, memory: Tensor | None) -> tuple[Tensor, ...]:
        """How many numbers are not 0, the stream of bits, and the norm of every bucket."""
        codes, norms = self.codec.coded(x, bits=8)
        levels = codes.numpy().astype(np.int64) - self.codec.levels
        return torch.tensor([np.count_nonzero(levels)], dtype=torch.int32), to_bytes(coded(levels)), norms

    def decode(self, payload: Sequence[Tensor], out: Tensor) -> None:
        """Levels of the norms."""
        numel, s = out.numel(), self.codec.levels
        length = payload[1].numel() if len(payload) > 1 else 0
        kinds = (1, torch.int32), (length, torch.uint8), (self.codec.buckets(numel), wide(out.dtype))
        count, stream, norms = expect(payload, *kinds)
        if not 0 <= int(count) <= numel:
            raise BadPayload(f"{int(count)} numbers came, but must be 0 to {numel}")
        indices, levels = decoded(from_bytes(stream), int(count))
        if len(levels) and (indices[-1] >= numel or np.abs(levels).max() > s):
            raise BadPayload(f"a level of {np.abs(levels).max()} or an index of {indices[-1]} came")
        codes = np.full(numel, s, np.uint8)
        codes[indices] = levels + s
        self.codec.write(torch.from_numpy(codes), norms, 8, out)

    def nbytes(self, like: Tensor) -> int:
        """About: by the bound of the paper for numbers that are not 0, s (s + sqrt(d)) of a bucket."""
        s, d = self.codec.levels, self.codec.bucket
        part = min(1.0, s * (s + sqrt(d)) / d)
        each = 1 + int(omega(np.array([round(1 / part), ceil(s / 4)]))[1].sum())
        return self._besides(like) + ceil(like.numel() * part * each / 8)

    def most(self, like: Tensor) -> int:
        """As if nothing were 0 and all had the highest level."""
        each = 2 + int(omega(np.array([self.codec.levels]))[1].max())
        return self._besides(like) + -(-like.numel() * each // 8)

    def _besides(self, like: Tensor) -> int:
        return 4 + self.codec.buckets(like.numel()) * wide(like.dtype).itemsize


def omega(n: Whole) -> tuple[Whole, Whole]:
    """The codes of numbers >= 1, and how many bits they have."""
    codes, lengths = np.zeros(len(n), np.int64), np.ones(len(n), np.int64)
    while (n > 1).any():
        width = np.where(n > 1, np.frexp(n)[1], 0)
        codes |= np.where(n > 1, n << lengths, 0)
        lengths += width
        n = np.maximum(width - 1, 1)
    return codes, lengths


def omegas(bits: Bits) -> tuple[Whole, Whole]:
    """The number whose code begins at each place, and how many bits that has; 0 if there is none so small."""
    word, start = windows(bits), np.arange(len(bits))
    n, place = np.ones(len(bits), np.int64), start.copy()
    more = bits == 1
    while more.any():
        length = np.where(more, n + 1, 0)
        n = np.where(more, word[np.minimum(place, len(bits) - 1)] >> np.maximum(32 - length, 0), n)
        place += length
        n[length > 31] = 0
        more &= (length <= 31) & (place < len(bits)) & (bits[np.minimum(place, len(bits) - 1)] == 1)
    return n, place + 1 - start


def coded(levels: Whole) -> Bits:
    """The bits of signed levels."""
    (where,) = levels.nonzero()
    (gaps, a), (sizes, b) = omega(np.diff(where, prepend=-1)), omega(np.abs(levels[where]))
    signs = (levels[where] < 0).astype(np.int64)
    return written(interleaved(gaps, signs, sizes), interleaved(a, np.ones_like(a), b))


def decoded(bits: Bits, count: int) -> tuple[Whole, Whole]:
    """Where the levels are that are not 0, and what they are."""
    gaps, levels, place = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], 0
    while count:
        here = np.concatenate([bits[place : place + STRETCH + MARGIN], np.zeros(MARGIN, np.uint8)])
        n, length = omegas(here)
        sign = np.minimum(np.arange(len(here)) + length, len(here) - 2)
        where, end = chain((sign + 1 + length[sign + 1])[:STRETCH], count)
        gaps.append(n[where])
        levels.append(np.where(here[sign[where]] == 1, -n[sign[where] + 1], n[sign[where] + 1]))
        place, count = place + end, count - len(where)
        if place > len(bits) or not n[where].all() or not levels[-1].all():
            raise BadPayload("a stream came that ends before all of its numbers, or holds none")
    check_end(bits, place)
    return np.cumsum(np.concatenate(gaps)) - 1, np.concatenate(levels)
