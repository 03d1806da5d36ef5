"""The kernels in torch and numpy: bit for bit the same for float32, and for float64 as well.

    sum of a row    64 partial sums:  p[i] = x[i] + x[i + 64] + x[i + 128] + ...,  then p[i] += p[i + 32], + 16, ... 1
    by its signs    the partial sums of each 1024 numbers separately; those are added one after the other

Functions that pass over a vector more than once do so block by block, while a block is in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from manyhands.codecs.noise import Seeds, uniform

Pairs = tuple[Tensor, Tensor]
"""Indices (int32, ascending) and values; or bits and means, codes and norms."""
Whole = NDArray[np.int64]

WIDTH = 64
ROWS_AT_ONCE = 16
"""Rows of partial sums that are added separately when signs are summed: 16 x 64 = 1024 numbers."""
CHUNK = 4096
"""Numbers whose moments are summed separately."""
CACHE_BLOCK = 2**18
"""Numbers that stay in the cache with their results, and are enough to hide the cost of the calls."""
TINY = 2.0**-100
"""A smaller norm counts as 0, because its reciprocal might be infinite."""
BITS = np.arange(256)[:, None] >> np.arange(8) & 1 == 1
"""The bits of every byte, the lowest first."""


# -- the largest ---------------------------------------------------------------------------------------


def reaching(x: Tensor, t: float, room: int) -> Tensor:
    """Indices of the first numbers with |x| >= t, at most `room`; NaN counts as infinite."""
    found, many = [np.empty(0, np.int64)], 0
    for start, piece in _blocks(x, CACHE_BLOCK):
        if many < room:
            found.append(np.flatnonzero(~(np.abs(piece.numpy()) < t)) + start)
            many += len(found[-1])
    return torch.from_numpy(np.concatenate(found)[:room]).int()


def largest(x: Tensor, k: int, sampled: int, rank: int, room: int) -> Pairs:
    """The k entries with the largest magnitudes; of equal ones the first, and NaN counts as infinite."""
    if sampled:
        sample = x[:: x.numel() // sampled][:sampled].abs().nan_to_num_(nan=torch.inf, posinf=torch.inf)
        few = reaching(x, float(sample.topk(rank, sorted=False).values.min()), room)
        if k <= few.numel() < room:
            indices, values = _largest(x[few], k)
            return few[indices], values
    return _largest(x, k)


def _largest(x: Tensor, k: int) -> Pairs:
    a = x.abs().nan_to_num_(nan=torch.inf, posinf=torch.inf)
    t = a.topk(k, sorted=False).values.min()
    above, equal = (a > t).nonzero().view(-1), (a == t).nonzero().view(-1)
    indices = torch.cat([above, equal[: k - above.numel()]]).sort().values
    return indices.int(), x[indices]


# -- signs ---------------------------------------------------------------------------------------------


def signs(x: Tensor, block: int) -> Pairs:
    """Bits of x >= 0, and for each block the means of those with bit 0, then of those with bit 1."""
    found, partial = [], []
    for both, piece in _halves(x, _whole(8 * block)):
        found.append(np.packbits(piece.numpy() >= 0, bitorder="little"))
        partial.append(_chunks(_rows(both, block)))
    bits, sums = np.concatenate(found), _fold(_run(torch.cat(partial, dim=1)))
    count = torch.from_numpy(_counts(bits, x.numel(), block))
    sizes = torch.full_like(count, block)
    sizes[-1] -= count.numel() * block - x.numel()
    return torch.from_numpy(bits), _mean(sums, torch.stack([sizes - count, count])).view(-1)


def _halves(x: Tensor, length: int) -> Iterator[Pairs]:
    """min(x, 0) and max(x, 0) of each block, in memory that is used again, and the block."""
    memory = x.new_empty(2, min(length, x.numel()))
    for _, piece in _blocks(x, length):
        both = memory[:, : piece.numel()]
        torch.clamp(piece, max=0, out=both[0])
        torch.clamp(piece, min=0, out=both[1])
        yield both, piece


def _chunks(rows: Tensor) -> Tensor:
    """The partial sums of each 1024 numbers of a row, or of all if they are fewer."""
    few = min(ROWS_AT_ONCE, -(-rows.shape[-1] // WIDTH))
    return _run(_rows(_rows(rows, few * WIDTH), WIDTH))


def _counts(bits: NDArray[np.uint8], numel: int, block: int) -> Whole:
    """The number of ones in each block of bits."""
    if block % 8 == 0:
        return _sums(np.bitwise_count(bits), block // 8)
    return _sums(np.unpackbits(bits, count=numel, bitorder="little"), block)


def _sums(x: NDArray[np.uint8], length: int) -> Whole:
    return np.add.reduceat(x, np.arange(0, len(x), length), dtype=np.int64)


def column_signs(x: Tensor, rows: int, columns: int) -> Pairs:
    """The same for the columns of a matrix: its rows are added one after the other."""
    bits, count = [], np.zeros(columns, np.int64)
    sums = np.zeros((2, columns), x.numpy().dtype)
    for both, piece in _halves(x, _whole(8 * columns)):
        above = piece.numpy() >= 0
        bits.append(np.packbits(above, bitorder="little"))
        count += np.count_nonzero(above.reshape(-1, columns), axis=0)
        for total, part in zip(sums, both.numpy(), strict=True):
            matrix = part.reshape(-1, columns)
            matrix[0] += total
            np.add.reduce(matrix, axis=0, out=total)
    counts = torch.from_numpy(np.stack([rows - count, count]))
    return torch.from_numpy(np.concatenate(bits)), _mean(torch.from_numpy(sums), counts).view(-1)


def unsign(bits: Tensor, block: int, means: Tensor, out: Tensor) -> None:
    """Each number becomes one of the means of its block."""
    low, high = means.view(2, -1, 1)
    for start, piece in _infinities(bits, out, _whole(8 * block)):
        first, whole = start // block, piece.numel() // block
        _bound(piece[: whole * block].view(whole, block), low[first:][:whole], high[first:][:whole])
        _bound(piece[whole * block :], low[-1], high[-1])


def column_unsign(bits: Tensor, columns: int, means: Tensor, out: Tensor) -> None:
    """Each number becomes one of the means of its column."""
    low, high = means.view(2, columns)
    for _, piece in _infinities(bits, out, _whole(8 * columns)):
        _bound(piece.view(-1, columns), low, high)


def _infinities(bits: Tensor, out: Tensor, length: int) -> Iterator[tuple[int, Tensor]]:
    """Blocks of `out`, filled with infinity for a 1 and -infinity for a 0, from a table of all bytes."""
    some, x = bits.numpy(), out.numpy()
    table = np.where(BITS, x.dtype.type(np.inf), x.dtype.type(-np.inf))
    for start, piece in _blocks(out, length):
        stop = start + piece.numel() // 8 * 8
        np.take(table, some[start // 8 : stop // 8], axis=0, out=x[start:stop].reshape(-1, 8), mode="clip")
        rest = piece[stop - start :]
        if rest.numel():
            rest.copy_(torch.from_numpy(table[some[-1], : rest.numel()]))
        yield start, piece


def _bound(x: Tensor, low: Tensor, high: Tensor) -> None:
    """Replace -infinity by `low` and infinity by `high`: `where` takes ten times as long."""
    torch.maximum(x, low, out=x)
    torch.minimum(x, high, out=x)


# -- stochastic rounding -------------------------------------------------------------------------------


def moments(x: Tensor) -> tuple[Tensor, float]:
    """The sum and the sum of squares of each chunk, and the largest |x|."""
    sums = []
    for _, piece in _blocks(x, CACHE_BLOCK):
        rows = _rows(piece, CHUNK)
        sums.append(torch.stack([folded(rows), folded(rows.square())], dim=1))
    return torch.cat(sums), float(x.abs().max())


def norms(x: Tensor, bucket: int, kind: str) -> Tensor:
    """The largest |x| of each bucket, or its l2-norm if the sum of squares is neither too small nor too large."""
    found = []
    for _, piece in _blocks(x, _whole(bucket)):
        rows = _rows(piece, bucket)
        found.append(rows.abs().amax(1))
        if kind == "l2":
            total = folded(rows.square())
            root = torch.from_numpy(np.sqrt(total.numpy()))
            found[-1] = torch.where((total >= 2.0**-60) & (total <= 2.0**100), root, found[-1])
    return torch.cat(found)


def quantise(x: Tensor, bucket: int, norm: Tensor, limit: float, levels: int, bits: int, pair: Seeds) -> Tensor:
    """The code of each number's level in its bucket; |x| is clamped to `limit`, and level 0 has the code `levels`."""
    n, packed = np.where(norm.numpy() < TINY, norm.numpy().dtype.type(0), norm.numpy()), []
    s = n.dtype.type(levels)
    over = np.nextafter(np.divide(s, n, out=np.zeros_like(n), where=n > 0), n.dtype.type(np.inf)) * (n > 0)
    for start, piece in _blocks(x, CACHE_BLOCK):
        v, many = piece.numpy(), (bucket, start, piece.numel())
        a = np.minimum(np.abs(v), n.dtype.type(limit)) * _repeated((n > 0).astype(n.dtype), *many)
        level = np.floor(np.minimum(a * _repeated(over, *many), s))
        with np.errstate(over="ignore", invalid="ignore"):
            left = a * s - level * _repeated(n, *many)
        level += uniform(pair, start, len(v)) * _repeated(n * n.dtype.type(2.0**-24), *many) < left
        codes = np.where(v < 0, s - level, s + level).astype(np.uint8)
        packed.append(_pack(codes, bits, levels))
    return torch.from_numpy(np.concatenate(packed))


def dequantise(codes: Tensor, bucket: int, norm: Tensor, levels: int, bits: int, out: Tensor) -> bool:
    """Write the numbers of the codes; False, and nothing is written, if a code is out of range."""
    each = 8 // bits
    table = np.arange(256)[:, None] >> np.arange(0, 8, bits) & (2**bits - 1)
    if (table > 2 * levels).any(1)[codes.numpy()].any():
        return False
    values, steps = (table - levels).astype(out.numpy().dtype), (norm / levels).numpy()
    for start, piece in _blocks(out, CACHE_BLOCK):
        some = codes[start // each : (start + CACHE_BLOCK) // each].numpy()
        level = values[some].reshape(-1)[: piece.numel()]
        np.multiply(level, _repeated(steps, bucket, start, piece.numel()), out=piece.numpy())
    return True


# -- helpers of the above --------------------------------------------------------------------------------


def folded(rows: Tensor) -> Tensor:
    """The sums of rows, added in the order of the kernels."""
    return _fold(_partial_sums(rows))


def _partial_sums(rows: Tensor) -> Tensor:
    """64 sums, each of every 64th number."""
    return _run(_rows(rows, WIDTH))


def _run(rows: Tensor) -> Tensor:
    """The sum over the last dimension but one, row after row (numpy adds so unless it is the last); never -0."""
    many = rows.shape[-2]
    if 8 < many <= ROWS_AT_ONCE and rows.shape[-1] == WIDTH:
        return rows.sum(-2) + 0.0  # torch adds row after row too, if they are few and this long
    if many > 8:
        with np.errstate(over="ignore"):
            return torch.from_numpy(np.add.reduce(rows.numpy(), axis=-2)) + 0.0
    total = rows[..., 0, :] + 0.0
    for i in range(1, many):
        total += rows[..., i, :]
    return total


def _fold(partial: Tensor) -> Tensor:
    while partial.shape[-1] > 1:
        half = partial.shape[-1] // 2
        partial = partial[..., :half] + partial[..., half:]
    return partial.squeeze(-1)


def _rows(x: Tensor, length: int) -> Tensor:
    """The last dimension as rows of that length, the last one padded with zeros."""
    missing = -x.shape[-1] % length
    return (pad(x, (0, missing)) if missing else x).reshape(*x.shape[:-1], -1, length)


def _mean(total: Tensor, count: Tensor) -> Tensor:
    return torch.where(count > 0, total / count.clamp(min=1).to(total.dtype) + 0.0, 0)


def _whole(length: int) -> int:
    """The largest multiple of `length` that fits into the cache, or `length` itself."""
    return max(1, CACHE_BLOCK // length) * length


def _blocks(x: Tensor, length: int) -> Iterator[tuple[int, Tensor]]:
    for start in range(0, x.numel(), length):
        yield start, x[start : start + length]


def _repeated(values: NDArray[Any], bucket: int, start: int, count: int) -> NDArray[Any]:
    """For each number from `start` on the value of its bucket."""
    first, last = start // bucket, (start + count - 1) // bucket + 1
    edges = (np.arange(first, last + 1) * bucket).clip(start, start + count)
    return np.repeat(values[first:last], np.diff(edges))


def _pack(codes: NDArray[np.uint8], bits: int, fill: int) -> NDArray[Any]:
    each = 8 // bits
    padded = np.pad(codes, (0, -len(codes) % each), constant_values=fill).reshape(-1, each)
    packed: NDArray[Any] = np.bitwise_or.reduce(padded << np.arange(0, 8, bits, dtype=np.uint8), axis=1)
    return packed
