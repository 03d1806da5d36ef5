"""Passes over flat rows of numbers: in C if that was compiled, else in fallback.py, with the same result.

A row is one-dimensional, contiguous and on the CPU (see `row` in payload.py). The kernels take float32; all other
dtypes use the fallback.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_float, c_int32, c_int64, c_uint32, c_void_p
from math import ceil, sqrt
from typing import Any

import torch
from torch import Tensor

from manyhands.codecs import fallback
from manyhands.codecs.fallback import Pairs
from manyhands.codecs.noise import Seeds
from manyhands.core.kernels import compiled

P, N = c_void_p, c_int64
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "largest": (N, P, N, N, N, N, N, P, P, P, P),
    "reaching": (N, P, N, c_float, N, P),
    "signs": (None, P, N, N, P, P),
    "unsign": (None, P, N, N, P, P),
    "column_signs": (None, P, N, N, P, P, P),
    "column_unsign": (None, P, N, N, P, P),
    "moments": (c_float, P, N, P),
    "quantise": (None, P, N, N, N, P, c_float, N, N, c_uint32, c_uint32, P),
    "dequantise": (c_int32, P, N, N, P, N, N, P),
}
"""The result type and the argument types of each kernel."""

KINDS = {"given": 0, "max": 1, "l2": 2}
SAMPLE = 2**15


def loaded() -> bool:
    """Whether the compiled kernels are in use."""
    return all(compiled(f"manyhands_{name}", *types) is not None for name, types in SIGNATURES.items())


def _kernel(name: str, x: Tensor) -> Callable[..., Any] | None:
    """The kernel for numbers of this dtype; None if there is none."""
    fits = x.dtype == torch.float32 and x.is_cpu and x.is_contiguous() and x.numel() > 0
    return compiled(f"manyhands_{name}", *SIGNATURES[name]) if fits else None


# -- the largest ---------------------------------------------------------------------------------------


def largest(x: Tensor, k: int) -> Pairs:
    """The k entries of a row with the largest magnitudes; of equal ones the first, and NaN counts as infinite.

    t = the k-th largest |x|      all |x| > t, then the first of those with |x| = t, until there are k
    """
    if k == 0:
        return x.new_empty(0, dtype=torch.int32), x.new_empty(0)
    guess = guessed(x.numel(), k)
    kernel = _kernel("largest", x)
    if kernel is None:
        return fallback.largest(x, k, *guess)
    (sampled, rank, room), n = guess, x.numel()
    indices, values = torch.empty(k, dtype=torch.int32), torch.empty(k)
    candidates, sample = torch.empty(room, dtype=torch.int32), torch.empty(max(room, sampled))
    kernel(*_at(x), n, k, sampled, rank, room, *_at(candidates, sample, indices, values))
    return indices, values


def guessed(numel: int, k: int) -> tuple[int, int, int]:
    """The sample size, the rank in the sample of a threshold that k numbers reach, and room for those that do.

    Of the k largest numbers s are in the sample on average, and more than s + 4 sqrt(s) almost never.
    All are 0 if sampling is not worth while.
    """
    s = k * SAMPLE / numel
    rank = ceil(s + 4 * sqrt(s) + 8)
    if numel < 4 * SAMPLE or 4 * rank > SAMPLE:
        return 0, 0, 0
    return SAMPLE, rank, ceil((rank + 8 * sqrt(rank)) * numel / SAMPLE)


def reaching(x: Tensor, t: float, room: int) -> Tensor:
    """Indices (int32, ascending) of the first entries of a row with |x| >= t, at most `room`."""
    kernel = _kernel("reaching", x)
    if kernel is None:
        return fallback.reaching(x, t, room)
    indices = torch.empty(room, dtype=torch.int32)
    return indices[: kernel(*_at(x), x.numel(), t, room, *_at(indices))]


# -- signs ---------------------------------------------------------------------------------------------


def signs(x: Tensor, block: int) -> Pairs:
    """The bits x >= 0, and for all blocks the mean of the numbers with bit 0, then of those with bit 1."""
    kernel = _kernel("signs", x)
    if kernel is None:
        return fallback.signs(x, block)
    bits, means = torch.empty(-(-x.numel() // 8), dtype=torch.uint8), torch.empty(2 * -(-x.numel() // block))
    kernel(*_at(x), x.numel(), block, *_at(bits, means))
    return bits, means


def column_signs(x: Tensor, rows: int, columns: int) -> Pairs:
    """The same for the columns of a matrix, given as a flat row."""
    kernel = _kernel("column_signs", x)
    if kernel is None:
        return fallback.column_signs(x, rows, columns)
    bits, means = torch.empty(-(-x.numel() // 8), dtype=torch.uint8), torch.zeros(2 * columns)
    count = torch.zeros(columns, dtype=torch.int32)
    kernel(*_at(x), rows, columns, *_at(bits, means, count))
    return bits, means


def unsign(bits: Tensor, block: int, means: Tensor, out: Tensor) -> None:
    """Each number becomes one of the means of its block."""
    kernel = _kernel("unsign", out)
    if kernel is None:
        fallback.unsign(bits, block, means, out)
    else:
        kernel(*_at(bits), out.numel(), block, *_at(means, out))


def column_unsign(bits: Tensor, rows: int, columns: int, means: Tensor, out: Tensor) -> None:
    """Each number becomes one of the means of its column."""
    kernel = _kernel("column_unsign", out)
    if kernel is None:
        fallback.column_unsign(bits, columns, means, out)
    else:
        kernel(*_at(bits), rows, columns, *_at(means, out))


# -- stochastic rounding -------------------------------------------------------------------------------


def moments(x: Tensor) -> tuple[Tensor, float]:
    """The sum and the sum of squares of each 4096 numbers, and the largest |x|."""
    kernel = _kernel("moments", x)
    if kernel is None:
        return fallback.moments(x)
    sums = torch.empty(-(-x.numel() // fallback.CHUNK), 2)
    return sums, kernel(*_at(x), x.numel(), *_at(sums))


def quantise(x: Tensor, bucket: int, norm: str, levels: int, bits: int, seeds: Seeds) -> Pairs:
    """The code of each number's level in its bucket, several per byte, and the norms ("l2" or "max")."""
    kernel = _kernel("quantise", x)
    if kernel is None:
        norms = fallback.norms(x, bucket, norm)
        return fallback.quantise(x, bucket, norms, torch.inf, levels, bits, seeds), norms
    codes, norms = torch.empty(-(-x.numel() * bits // 8), dtype=torch.uint8), torch.empty(-(-x.numel() // bucket))
    kernel(*_at(x), x.numel(), bucket, KINDS[norm], *_at(norms), torch.inf, levels, bits, *seeds, *_at(codes))
    return codes, norms


def ternary(x: Tensor, scale: Tensor, limit: float, seeds: Seeds) -> Tensor:
    """The code of the sign of each number, or of 0, four per byte; |x| is clamped to `limit`."""
    kernel = _kernel("quantise", x)
    if kernel is None:
        return fallback.quantise(x, x.numel(), scale, limit, 1, 2, seeds)
    codes = torch.empty(-(-x.numel() // 4), dtype=torch.uint8)
    kernel(*_at(x), x.numel(), x.numel(), KINDS["given"], *_at(scale), limit, 1, 2, *seeds, *_at(codes))
    return codes


def dequantise(codes: Tensor, bucket: int, norms: Tensor, levels: int, bits: int, out: Tensor) -> bool:
    """Write the numbers of the codes; False, and nothing is written, if a code is out of range."""
    kernel = _kernel("dequantise", out)
    if kernel is None:
        return fallback.dequantise(codes, bucket, norms, levels, bits, out)
    return bool(kernel(*_at(codes), out.numel(), bucket, *_at(norms), levels, bits, *_at(out)))


def _at(*rows: Tensor) -> list[int]:
    return [row.data_ptr() for row in rows]
