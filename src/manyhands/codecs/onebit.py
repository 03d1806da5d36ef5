"""One bit: send the signs of the numbers, and two means for each column of a matrix.

    bit = 1 if a >= 0                         u1[j] = mean of the numbers of column j with bit 1, u0[j] with bit 0
    decoded = u1[j] if bit else u0[j]         an empty mean is 0

        a        1 -2        bits   1 0        u1   4/3  5/2        decoded    4/3 -3/2
                 3  0               1 1        u0   -4  -3/2                   4/3  5/2
                -4  5               0 1                                        -4   5/2
                 0 -1               1 0                                        4/3 -3/2

The two means make the squared error of a column least, and its sum is what it was. A column of nn.Linear's weight,
which is [out, in], belongs to one input. Biased: use it inside `Feedback`.

Reference: F. Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training
of Speech DNNs", 2014, https://www.isca-archive.org/interspeech_2014/seide14_interspeech.html.

Where we differ: what is no matrix, or a matrix of which there is only a stretch, is cut into blocks that are treated
like columns. A block is as long as a column of a large matrix, 4096: its means cost almost nothing, 1/64 of a bit for a
number. Shorter ones follow the sizes of their numbers more closely, but with feedback that is not needed: with 256
(1/4 bit each) `onebit_sgd` learns no better.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from manyhands.codecs.native import column_signs, column_unsign, signs, unsign
from manyhands.codecs.payload import check_finite, check_spare, expect, row, row_of, wide
from manyhands.core.errors import BadPayload, refuse_unless

BLOCK = 4096
"""Numbers that share two means where there are no columns."""


@dataclass(frozen=True)
class OneBit:
    """A bit for each number.

    Args:
        block: how many neighbours share two means; 0: columns of matrices do, and 4096 neighbours elsewhere.
    """

    block: int = 0
    by_parameter: ClassVar[bool] = True

    def __post_init__(self) -> None:
        refuse_unless(self.block >= 0, "block", self.block, ">= 0")

    def memory(self, like: Tensor) -> None:
        """Nothing; wrap it in `Feedback` to remember what was lost."""
        return None

    def encode(self, x: Tensor, memory: Tensor | None) -> tuple[Tensor, ...]:
        """The bits of all numbers, eight in a byte, and the means: all u0, then all u1."""
        columns = self._columns(x)
        if not x.numel():
            return torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=wide(x.dtype))
        return column_signs(row(x), len(x), columns) if columns else signs(row(x), self._block(x))

    def decode(self, payload: Sequence[Tensor], out: Tensor) -> None:
        """Means instead of bits."""
        groups, columns = self._groups(out), self._columns(out)
        bits, means = expect(payload, (-(-out.numel() // 8), torch.uint8), (2 * groups, wide(out.dtype)))
        check_finite(means)
        check_spare(bits, out.numel(), 1, 0)
        if bool((means[:groups] > 0).any()) or bool((means[groups:] < 0).any()):
            raise BadPayload("a mean of negative numbers came that is positive, or the other way round")
        with row_of(out) as plain:
            if columns:
                column_unsign(bits, len(out), columns, means, plain)
            else:
                unsign(bits, self._block(out), means, plain)

    def nbytes(self, like: Tensor) -> int:
        """A bit per number, and two means per group."""
        return -(-like.numel() // 8) + 2 * self._groups(like) * wide(like.dtype).itemsize

    def _columns(self, x: Tensor) -> int:
        """How many columns are treated as such; 0 if blocks are."""
        columns = x.numel() // len(x) if x.dim() > 1 and x.numel() else 0
        return columns if columns > 1 and not self.block else 0

    def _block(self, x: Tensor) -> int:
        """How many neighbours share two means: a matrix of one column is a block by itself."""
        return self.block or (BLOCK if x.dim() < 2 else max(1, x.numel()))

    def _groups(self, x: Tensor) -> int:
        """How many pairs of means there are."""
        return self._columns(x) or -(-x.numel() // self._block(x))
