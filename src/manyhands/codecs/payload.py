"""What may come in as a payload: whoever decodes refuses what no encoder can have made. And plain rows of numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from manyhands.core.errors import BadPayload
from manyhands.core.protocols import Payload

Row = tuple[int, torch.dtype]
"""How many numbers of which kind."""


def expect(payload: Payload, *rows: Row) -> tuple[Tensor, ...]:
    """The tensors of a payload, if they are as many, as long and of the kinds that they must be; as plain rows."""
    came = [(x.numel(), x.dtype) for x in payload]
    if came != list(rows):
        raise BadPayload(f"a payload of {_words(came)} came, but must be {_words(rows)}")
    return tuple(x.reshape(-1).contiguous() for x in payload)


def pairs_in(payload: Payload, out: Tensor, least: int, most: int) -> tuple[Tensor, Tensor]:
    """Indices and values, if they are so many and fit `out`: indices ascend, each once, and none is beyond the end."""
    length = payload[0].numel() if payload else 0
    indices, values = expect(payload, (length, torch.int32), (length, out.dtype))
    if not least <= length <= most:
        raise BadPayload(f"{length} pairs came, but must be {least} to {most}")
    check_ascending(indices, out.numel())
    check_finite(values)
    return indices, values


def check_finite(values: Tensor) -> None:
    """Refuse what is no number."""
    if not bool(values.isfinite().all()):
        raise BadPayload("a payload holds NaN or infinity, but must be finite")


def check_scales(scales: Tensor) -> None:
    """Refuse what is no number, or a negative one."""
    check_finite(scales)
    if bool((scales < 0).any()):
        raise BadPayload(f"a scale of {float(scales.min())} came, but must be >= 0")


def check_ascending(indices: Tensor, numel: int) -> None:
    """Refuse indices that do not ascend, or lead out of a row of that many numbers."""
    if not indices.numel():
        return
    low, high = int(indices[0]), int(indices[-1])
    if low < 0 or high >= numel or not bool((indices[1:] > indices[:-1]).all()):
        raise BadPayload(f"indices from {low} to {high} came for {numel} numbers, but must ascend within them")


def check_spare(packed: Tensor, numel: int, bits: int, fill: int) -> None:
    """Refuse packed codes of so many bits if those behind the last number are not as they were filled up."""
    spare = packed.numel() * 8 // bits - numel
    if spare:
        code = 2**bits - 1
        last = int(packed[-1])
        if any(last >> (8 - bits * i) & code != fill for i in range(1, spare + 1)):
            raise BadPayload(f"the last byte is {last}, but its last {spare} codes must be {fill}")


def wide(dtype: torch.dtype) -> torch.dtype:
    """In which kind of numbers one computes with those of another."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def no_scale(x: Tensor) -> Tensor:
    """The scale of nothing, or of something that has no values."""
    return torch.zeros(1, dtype=wide(x.dtype), device="meta" if x.is_meta else "cpu")


def row(x: Tensor) -> Tensor:
    """All numbers of a tensor as a plain row to compute with; itself if it is one."""
    return x.detach().to("cpu", wide(x.dtype)).reshape(-1)


@contextmanager
def row_of(out: Tensor) -> Iterator[Tensor]:
    """A plain row to be written, which becomes the numbers of `out`, or is them."""
    plain = out.detach()
    if out.is_cpu and out.is_contiguous() and out.dtype == wide(out.dtype):
        yield plain.view(-1)
    else:
        x = torch.empty(out.numel(), dtype=wide(out.dtype))
        yield x
        plain.copy_(x.view(out.shape))


def place(indices: Tensor, values: Tensor | float, out: Tensor) -> None:
    """Write values at some places of a tensor of any shape, counted as in a plain row."""
    if not out.is_contiguous():
        out[torch.unravel_index(indices.long(), out.shape)] = values
    elif isinstance(values, Tensor):
        out.view(-1).scatter_(0, indices.long(), values)
    else:
        out.view(-1).index_fill_(0, indices.long(), values)


def _words(rows: Sequence[Row]) -> str:
    return " and ".join(f"{count} of {str(dtype).removeprefix('torch.')}" for count, dtype in rows) or "nothing"
