"""Sampled top-k: top-k with a threshold that is estimated from a sample of the numbers.

    sample     every m-th number, from a random one of the first m on          m = about 1 / sample
    t          the k' = ceil(fraction * size of the sample)-th largest |x| of the sample
    payload    (i, x[i]) for the first k indices with |x| >= t; if they are fewer than k / 2, of the k largest |x|

It takes one pass over the vector and sorts nothing. Inside `Feedback` the selection need not be exact: numbers that are
left out are sent later.

Reference: Y. Lin et al., "Deep Gradient Compression", 2018, https://arxiv.org/abs/1712.01887: 0.1 % to 1 % are sampled.

Where we differ: if too many numbers reach t the first k are sent, instead of selecting again among them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from manyhands.codecs.payload import pairs_in, write_at
from manyhands.codecs.topk import check_length, kept
from manyhands.codecs.vector_kernels import largest, reaching
from manyhands.core.codec import Codec, CodecTraits
from manyhands.core.errors import refuse_unless


@dataclass(frozen=True)
class SampledTopK:
    """Approximately the largest numbers only.

    Args:
        fraction: k / numel, rounded up to the next whole k.
        sample: the fraction of the numbers from which t is estimated.
    """

    fraction: float = 0.01
    sample: float = 0.01
    by_parameter: ClassVar[bool] = False
    traits: ClassVar[CodecTraits] = CodecTraits(random=True, varies=True)

    def __post_init__(self) -> None:
        refuse_unless(0 < self.fraction <= 1, "fraction", self.fraction, "> 0 and <= 1")
        refuse_unless(0 < self.sample <= 1, "sample", self.sample, "> 0 and <= 1")

    def memory(self, like: Tensor) -> None:
        """No memory; `Feedback` around it remembers what was not sent."""
        return None

    def encode(self, x: Tensor, memory: Tensor | None) -> tuple[Tensor, ...]:
        """Indices (int32, ascending) and their values."""
        check_length(x)
        x, k = x.detach().reshape(-1), kept(self.fraction, x.numel())
        if x.numel() == 0:
            return largest(x, 0)
        indices = reaching(x, self._threshold(x), k)
        return largest(x, k) if 2 * indices.numel() < k else (indices, x[indices.long()])

    def _threshold(self, x: Tensor) -> float:
        """t, from every m-th number."""
        m = min(x.numel(), round(1 / self.sample))
        some = x[int(torch.randint(m, ())) :: m].abs()
        return float(some.topk(kept(self.fraction, some.numel()), sorted=False).values.min())

    def decode(self, payload: Sequence[Tensor], out: Tensor) -> None:
        """Zeros, with the values at their indices."""
        k = kept(self.fraction, out.numel())
        indices, values = pairs_in(payload, out, min(1, k), k)
        write_at(indices, values, out.zero_())

    def pairs(self, payload: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The payload itself is the pair of indices and values."""
        indices, values = payload
        return indices, values

    def with_fraction(self, fraction: float) -> SampledTopK:
        """The same codec with another fraction."""
        return replace(self, fraction=fraction)

    def nbytes(self, like: Tensor) -> int:
        """An estimate: as if k numbers were sent."""
        return self.most(like)

    def most(self, like: Tensor) -> int:
        """An index and a value for each of k numbers."""
        return kept(self.fraction, like.numel()) * (4 + like.element_size())


EXAMPLES: Mapping[str, Codec] = {"sampled top 30%": SampledTopK(0.3, 0.2)}
