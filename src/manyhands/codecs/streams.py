"""Streams of bits: numbers of different lengths one after the other, and how to find where each begins.

written     highest bit first, the first bit of the stream in the lowest of its first byte
windows     at every place the whole number that the next 32 bits are: any field can be cut out of one
chain       where each item begins, if at every place it is known where the next would: places 0, next[0], ...
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from manyhands.core.errors import BadPayload

Whole = NDArray[np.int64]
"""Numbers."""
Bits = NDArray[np.uint8]
"""0 or 1 each."""

SOME = 2**16
"""Numbers that are written at a time."""


def written(codes: Whole, lengths: Whole) -> Bits:
    """The bits of numbers, so many of each; all bits of -1 are 1, however many they are."""
    found = [np.empty(0, np.uint8)]
    for start in range(0, len(codes), SOME):
        length = lengths[start : start + SOME]
        ends = np.cumsum(length)
        left = np.repeat(ends, length) - np.arange(1, ends[-1] + 1)
        some = np.repeat(codes[start : start + SOME], length) >> np.minimum(left, 63)
        found.append((some & 1).astype(np.uint8))
    return np.concatenate(found)


def interleaved(*rows: Whole) -> Whole:
    """The first of each row, then the second of each, and so on."""
    return np.stack(rows, axis=1).reshape(-1)


def to_bytes(bits: Bits) -> Tensor:
    """Eight in one."""
    return torch.from_numpy(np.packbits(bits, bitorder="little"))


def from_bytes(stream: Tensor) -> Bits:
    """All bits of a stream, those too that fill up its last byte."""
    return np.unpackbits(stream.cpu().numpy(), bitorder="little")


def windows(bits: Bits) -> Whole:
    """The number that the 32 bits from each place on are, as if zeros followed the last."""
    found = np.concatenate([bits.astype(np.int64), np.zeros(32, np.int64)])
    for width in 1, 2, 4, 8, 16:
        found[:-width] = found[:-width] << width | found[width:]
    return found[: len(bits)]


def chain(following: Whole, count: int) -> tuple[Whole, int]:
    """The first places of a chain, as many as that and no further than it reaches, and where the next one is."""
    where: list[int] = []
    place, after = 0, following.tolist()
    while len(where) < count and place < len(after):
        where.append(place)
        place = after[place]
    return np.array(where, np.int64), place


def check_end(bits: Bits, end: int) -> None:
    """Refuse a stream that does not end where the last byte does, filled up with zeros."""
    if end > len(bits) or len(bits) - end > 7 or bits[end:].any():
        raise BadPayload(f"a stream of {len(bits)} bits came, but its numbers end at {end}")
