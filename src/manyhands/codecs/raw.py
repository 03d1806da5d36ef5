"""Raw: send the numbers as they are.

payload = x                   decode = copy
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from manyhands.codecs.payload import expect


@dataclass(frozen=True)
class Raw:
    """No compression; the payload is the vector itself, not a copy."""

    by_parameter: ClassVar[bool] = False

    def memory(self, like: Tensor) -> None:
        """Nothing is lost, so there is nothing to remember."""
        return None

    def encode(self, x: Tensor, memory: Tensor | None) -> tuple[Tensor, ...]:
        """The vector itself."""
        return (x,)

    def decode(self, payload: Sequence[Tensor], out: Tensor) -> None:
        """Copy."""
        (x,) = expect(payload, (out.numel(), out.dtype))
        out.copy_(x.view(out.shape))

    def plain(self, payload: Sequence[Tensor]) -> Tensor:
        """The vector as it lies in the payload: whoever only reads it needs no copy."""
        return payload[0]

    def rounding(self, dtype: torch.dtype) -> float:
        """Nothing changes."""
        return 0.0

    def nbytes(self, like: Tensor) -> int:
        """All of them."""
        return like.nbytes
