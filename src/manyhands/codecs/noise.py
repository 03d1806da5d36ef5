"""Random numbers that follow from a place: any of them can be computed by itself, here or in C.

    h = place * 2654435761 + seed            all of this modulo 2^32
    h = (h ^ h >> 16) * 0x85ebca6b
    h = (h ^ h >> 13 ^ other) * 0xc2b2ae35
    u = (h ^ h >> 16) >> 8                   24 bits, so that a float32 holds them; u < p 2^24 with probability p

Reference: A. Appleby, "MurmurHash3", 2011, https://github.com/aappleby/smhasher: how it mixes the bits of a number.

Where we differ: the second seed comes in between its two multiplications, so that two seeds are never a shift of one
another's numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Seeds = tuple[int, int]

STEPS = np.float32(2**24)
"""How many numbers there are."""


def seeds() -> Seeds:
    """Two words of torch's default generator."""
    one, two = torch.randint(2**32, (2,)).tolist()
    return one, two


def uniform(pair: Seeds, first: int, count: int) -> NDArray[np.float32]:
    """The whole numbers u of that many places from the first on."""
    seed, other = (np.uint32(word) for word in pair)
    h = np.arange(first, first + count).astype(np.uint32)
    h *= np.uint32(0x9E3779B1)
    h += seed
    h ^= h >> 16
    h *= np.uint32(0x85EBCA6B)
    h ^= h >> 13
    h ^= other
    h *= np.uint32(0xC2B2AE35)
    h ^= h >> 16
    h >>= 8
    return h.astype(np.float32)


def rounded(y: NDArray[Any], u: NDArray[np.float32]) -> NDArray[Any]:
    """y or the whole number above it, such that the mean over all u is y."""
    low: NDArray[Any] = np.floor(y)
    low += u < (y - low) * STEPS
    return low
