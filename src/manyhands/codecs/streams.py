"""Bit streams: codes of different lengths one after the other, and how to find where each begins.

written     highest bit of a code first; the first bit of the stream is the lowest bit of its first byte
windows     for every bit the integer made of the 32 bits that begin there, of which any field is a part
chain       where each item begins, given for every bit where the next item would begin: 0, next[0], next[next[0]], ...
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from manyhands.core.errors import BadPayload

Whole = NDArray[np.int64]
Bits = NDArray[np.uint8]
"""Each 0 or 1."""

SOME = 2**16
"""Codes that are written at a time."""


def written(codes: Whole, lengths: Whole) -> Bits:
    """The lowest `lengths` bits of each code; -1 has any number of ones."""
    found = [np.empty(0, np.uint8)]
    for start in range(0, len(codes), SOME):
        length = lengths[start : start + SOME]
        ends = np.cumsum(length)
        left = np.repeat(ends, length) - np.arange(1, ends[-1] + 1)
        some = np.repeat(codes[start : start + SOME], length) >> np.minimum(left, 63)
        found.append((some & 1).astype(np.uint8))
    return np.concatenate(found)


def interleaved(*rows: Whole) -> Whole:
    """The first number of each row, then the second of each, and so on."""
    return np.stack(rows, axis=1).reshape(-1)


def to_bytes(bits: Bits) -> Tensor:
    """Bits packed into bytes, eight in each."""
    return torch.from_numpy(np.packbits(bits, bitorder="little"))


def from_bytes(stream: Tensor) -> Bits:
    """All bits of a stream, with the padding of its last byte."""
    return np.unpackbits(stream.cpu().numpy(), bitorder="little")


def windows(bits: Bits) -> Whole:
    """For every bit the integer of the 32 bits that begin there; the stream is padded with zeros."""
    found = np.concatenate([bits.astype(np.int64), np.zeros(32, np.int64)])
    for width in 1, 2, 4, 8, 16:
        found[:-width] = found[:-width] << width | found[width:]
    return found[: len(bits)]


def chain(following: Whole, count: int) -> tuple[Whole, int]:
    """Where the first `count` items begin, or fewer if the chain leaves the array; and where the next one would."""
    starts: list[int] = []
    index, after = 0, following.tolist()
    while len(starts) < count and index < len(after):
        starts.append(index)
        index = after[index]
    return np.array(starts, np.int64), index


def check_end(bits: Bits, end: int) -> None:
    """Refuse a stream that does not end in its last byte, padded with zeros."""
    if end > len(bits) or len(bits) - end > 7 or bits[end:].any():
        raise BadPayload(f"a stream has {len(bits)} bits, but its numbers end at bit {end}")
