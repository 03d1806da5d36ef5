"""Sampled top-k: as top-k, but how large the largest numbers are is estimated from a few.

    sample     every m-th number, from a random one of the first m on          m = about 1 / sample
    t          the k' = ceil(fraction * size of the sample)-th largest |x| of the sample
    payload    (i, x[i]) for those with |x| >= t, the first k if they are more; if less than k / 2, the k largest

It takes one pass over the vector and nothing has to be sorted. For `Feedback` it does not matter that the choice is not
exact: what is left out is sent later.

Reference: Y. Lin et al., "Deep Gradient Compression", 2018, https://arxiv.org/abs/1712.01887: 0.1 % to 1 % are sampled.

Where we differ: if too many numbers reach t the first ones go, instead of selecting once more among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from manyhands.codecs.native import largest, reaching
from manyhands.codecs.payload import pairs_in, place
from manyhands.codecs.topk import check_length, kept
from manyhands.core.errors import refuse_unless


@dataclass(frozen=True)
class SampledTopK:
    """About the largest numbers only.

    Args:
        fraction: k / numel, rounded up to the next whole k.
        sample: the fraction of the numbers that is looked at first.
    """

    fraction: float = 0.01
    sample: float = 0.01
    by_parameter: ClassVar[bool] = False

    def __post_init__(self) -> None:
        refuse_unless(0 < self.fraction <= 1, "fraction", self.fraction, "> 0 and <= 1")
        refuse_unless(0 < self.sample <= 1, "sample", self.sample, "> 0 and <= 1")

    def memory(self, like: Tensor) -> None:
        """Nothing; wrap it in `Feedback` to remember what was not sent."""
        return None

    def encode(self, x: Tensor, memory: Tensor | None) -> tuple[Tensor, ...]:
        """Indices (int32, ascending) and their values."""
        check_length(x)
        x, k = x.detach().reshape(-1), self.kept(x.numel())
        if x.numel() == 0:
            return largest(x, 0)
        indices = reaching(x, self.threshold(x), k)
        return largest(x, k) if 2 * indices.numel() < k else (indices, x[indices.long()])

    def threshold(self, x: Tensor) -> float:
        """t."""
        m = min(x.numel(), round(1 / self.sample))
        some = x[int(torch.randint(m, ())) :: m].abs()
        return float(some.topk(kept(self.fraction, some.numel()), sorted=False).values.min())

    def decode(self, payload: Sequence[Tensor], out: Tensor) -> None:
        """Zeros with the values in their places."""
        k = self.kept(out.numel())
        indices, values = pairs_in(payload, out, min(1, k), k)
        place(indices, values, out.zero_())

    def pairs(self, payload: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Indices and values of a payload of ours."""
        indices, values = payload
        return indices, values

    def with_fraction(self, fraction: float) -> SampledTopK:
        """The same with another fraction."""
        return replace(self, fraction=fraction)

    def nbytes(self, like: Tensor) -> int:
        """As if there were k."""
        return self.most(like)

    def most(self, like: Tensor) -> int:
        """An index and a value for each of k numbers."""
        return self.kept(like.numel()) * (4 + like.element_size())

    def kept(self, numel: int) -> int:
        """k."""
        return kept(self.fraction, numel)
