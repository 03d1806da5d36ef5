"""Raw: send the numbers unchanged.

payload = x                   decode = copy
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from manyhands.codecs.payload import expect
from manyhands.core.codec import Codec, CodecTraits


@dataclass(frozen=True)
class Raw:
    """No compression; the payload is the vector itself, not a copy."""

    by_parameter: ClassVar[bool] = False
    traits: ClassVar[CodecTraits] = CodecTraits(plain=True)

    def memory(self, like: Tensor) -> None:
        """No memory: nothing is lost."""
        return None

    def encode(self, x: Tensor, memory: Tensor | None) -> tuple[Tensor, ...]:
        """The vector itself, not a copy."""
        return (x,)

    def decode(self, payload: Sequence[Tensor], out: Tensor) -> None:
        """Copy the payload into `out`."""
        (x,) = expect(payload, (out.numel(), out.dtype))
        out.copy_(x.view(out.shape))

    def rounding(self, dtype: torch.dtype) -> float:
        """0: no number changes."""
        return 0.0

    def nbytes(self, like: Tensor) -> int:
        """The bytes of the vector."""
        return like.nbytes


EXAMPLES: Mapping[str, Codec] = {"raw": Raw()}
