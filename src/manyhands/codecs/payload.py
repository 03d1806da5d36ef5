"""Checks of received payloads, which refuse what no encoder can have made; and flat rows of numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from manyhands.core.codec import Payload
from manyhands.core.errors import BadPayload

Row = tuple[int, torch.dtype]
"""The length and dtype of a tensor of a payload."""


def expect(payload: Payload, *rows: Row) -> tuple[Tensor, ...]:
    """The tensors of a payload as flat rows, if their number, lengths and dtypes are these; else it is refused."""
    received = [(x.numel(), x.dtype) for x in payload]
    if received != list(rows):
        raise BadPayload(f"a payload is {_words(received)}, but must be {_words(rows)}")
    return tuple(x.reshape(-1).contiguous() for x in payload)


def pairs_in(payload: Payload, out: Tensor, least: int, most: int) -> tuple[Tensor, Tensor]:
    """Indices and values: at least `least` and at most `most` pairs, indices ascending and within `out`."""
    length = payload[0].numel() if payload else 0
    indices, values = expect(payload, (length, torch.int32), (length, out.dtype))
    if not least <= length <= most:
        raise BadPayload(f"the number of pairs is {length}, but must be >= {least} and <= {most}")
    check_ascending(indices, out.numel())
    check_finite(values)
    return indices, values


def check_finite(values: Tensor) -> None:
    """Refuse NaN and infinity."""
    if not bool(values.isfinite().all()):
        raise BadPayload("a payload holds NaN or infinity, but must be finite")


def check_scales(scales: Tensor) -> None:
    """Refuse NaN, infinity and negative numbers."""
    check_finite(scales)
    if bool((scales < 0).any()):
        raise BadPayload(f"a scale is {float(scales.min())}, but must be >= 0")


def check_ascending(indices: Tensor, numel: int) -> None:
    """Refuse indices that do not ascend, or lie outside of a row of `numel` numbers."""
    if not indices.numel():
        return
    low, high = int(indices[0]), int(indices[-1])
    if low < 0 or high >= numel or not bool((indices[1:] > indices[:-1]).all()):
        raise BadPayload(f"indices are {low} to {high}, but must ascend and be >= 0 and < {numel}")


def check_spare(packed: Tensor, numel: int, bits: int, fill: int) -> None:
    """Refuse packed codes of `bits` bits if the unused ones in the last byte are not `fill`."""
    spare = packed.numel() * 8 // bits - numel
    if spare:
        code = 2**bits - 1
        last = int(packed[-1])
        if any(last >> (8 - bits * i) & code != fill for i in range(1, spare + 1)):
            raise BadPayload(f"the last byte is {last}, but its last {spare} codes must be {fill}")


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in: float64 for float64, float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def no_scale(x: Tensor) -> Tensor:
    """The scale of an empty tensor, or of one without values (a meta tensor)."""
    return torch.zeros(1, dtype=wide(x.dtype), device="meta" if x.is_meta else "cpu")


def row(x: Tensor) -> Tensor:
    """All numbers of a tensor as a flat row to compute with; a view of it if possible."""
    return x.detach().to("cpu", wide(x.dtype)).reshape(-1)


@contextmanager
def row_of(out: Tensor) -> Iterator[Tensor]:
    """A flat row to write to: `out` itself if it is flat in memory, else a copy that is written back."""
    plain = out.detach()
    if out.is_cpu and out.is_contiguous() and out.dtype == wide(out.dtype):
        yield plain.view(-1)
    else:
        x = torch.empty(out.numel(), dtype=wide(out.dtype))
        yield x
        plain.copy_(x.view(out.shape))


def write_at(indices: Tensor, values: Tensor | float, out: Tensor) -> None:
    """Write values at some indices of a tensor of any shape, counted as in a flat row."""
    if not out.is_contiguous():
        out[torch.unravel_index(indices.long(), out.shape)] = values
    elif isinstance(values, Tensor):
        out.view(-1).scatter_(0, indices.long(), values)
    else:
        out.view(-1).index_fill_(0, indices.long(), values)


def _words(rows: Sequence[Row]) -> str:
    return " and ".join(f"{count} of {str(dtype).removeprefix('torch.')}" for count, dtype in rows) or "nothing"
