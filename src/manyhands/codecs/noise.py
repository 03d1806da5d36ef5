"""Counter-based random numbers: each follows from its index alone, here and in C.

    h = index * 2654435761 + seed            all of this modulo 2^32
    h = (h ^ h >> 16) * 0x85ebca6b
    h = (h ^ h >> 13 ^ other) * 0xc2b2ae35
    u = (h ^ h >> 16) >> 8                   24 bits, so that a float32 holds them; u < p 2^24 with probability p

Reference: A. Appleby, "MurmurHash3", 2011, https://github.com/aappleby/smhasher: its
finalizer, which mixes the bits of a number.

Where we differ: a second seed enters between the two multiplications, so that the numbers of one seed are never those
of another one, shifted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Seeds = tuple[int, int]

STEPS = np.float32(2**24)
"""How many different values u has."""


def seeds() -> Seeds:
    """Two words of torch's default generator."""
    one, two = torch.randint(2**32, (2,)).tolist()
    return one, two


def uniform(pair: Seeds, first: int, count: int) -> NDArray[np.float32]:
    """The integers u of `count` indices, from `first` on."""
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
    """floor(y) or floor(y) + 1, such that the mean over all u is y."""
    low: NDArray[Any] = np.floor(y)
    low += u < (y - low) * STEPS
    return low
