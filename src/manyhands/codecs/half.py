"""Half precision: round every number to 16 bits.

    payload = clamp(round(x), -max, max)          max = 65504 for fp16, 3.4e38 for bf16

Reference: fp16: IEEE 754-2008 binary16, numbers below 6e-8 become 0; bf16: D. Kalamkar et al., "A Study of BFLOAT16
for Deep Learning Training", 2019, https://arxiv.org/abs/1905.12322: the range of float32 with 8 bits of precision.

Where we differ: a number beyond the range becomes the largest one and not infinity, so that under `Feedback` the rest
is sent later. NaN stays NaN.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from manyhands.codecs.payload import expect
from manyhands.core.codec import Codec, CodecTraits
from manyhands.core.errors import refuse_unless

FORMATS = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Half:
    """Two bytes per number.

    Args:
        kind: "fp16" (more precision) or "bf16" (more range).
    """

    kind: Literal["fp16", "bf16"] = "fp16"
    by_parameter: ClassVar[bool] = False
    traits: ClassVar[CodecTraits] = CodecTraits()

    def __post_init__(self) -> None:
        refuse_unless(self.kind in FORMATS, "kind", self.kind, "one of " + ", ".join(FORMATS))

    def memory(self, like: Tensor) -> None:
        """No memory; `Feedback` around it remembers the rounding error."""
        return None

    def encode(self, x: Tensor, memory: Tensor | None) -> tuple[Tensor, ...]:
        """Round, and saturate at the largest finite number."""
        dtype = FORMATS[self.kind]
        limit = torch.finfo(dtype).max
        return (x.to(dtype, copy=True).clamp_(-limit, limit),)

    def decode(self, payload: Sequence[Tensor], out: Tensor) -> None:
        """Cast to the dtype of `out`."""
        (x,) = expect(payload, (out.numel(), FORMATS[self.kind]))
        out.copy_(x.view(out.shape))

    def rounding(self, dtype: torch.dtype) -> float:
        """Half a unit in the last place."""
        return torch.finfo(FORMATS[self.kind]).eps / 2

    def nbytes(self, like: Tensor) -> int:
        """Two bytes per number."""
        return 2 * like.numel()


EXAMPLES: Mapping[str, Codec] = {"half(fp16)": Half("fp16"), "half(bf16)": Half("bf16")}
