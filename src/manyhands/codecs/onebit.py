"""One bit: send the signs of the numbers, and two means for each column of a matrix.

    bit = 1 if a >= 0                         u1[j] = mean of the numbers of column j with bit 1, u0[j] with bit 0
    decoded = u1[j] if bit else u0[j]         an empty mean is 0

        a        1 -2        bits   1 0        u1   4/3  5/2        decoded    4/3 -3/2
                 3  0               1 1        u0   -4  -3/2                   4/3  5/2
                -4  5               0 1                                        -4   5/2
                 0 -1               1 0                                        4/3 -3/2

The two means minimise the squared error of a column and preserve its sum. A column of nn.Linear's weight,
which is [out, in], belongs to one input. Biased: use it inside `Feedback`.

Reference: F. Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training
of Speech DNNs", 2014, https://www.isca-archive.org/interspeech_2014/seide14_interspeech.html.

Where we differ: a parameter that is not a matrix, or of which the span holds only a part, is cut into blocks that are
treated like columns. A block is as long as a column of a large matrix, 4096: its two means cost 1/64 bit per number.
Shorter blocks fit their numbers more closely, but feedback makes that unnecessary: with 256 (1/4 bit per number)
`onebit_sgd` learns no better.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from manyhands.codecs.payload import check_finite, check_spare, expect, row, row_of, wide
from manyhands.codecs.vector_kernels import column_signs, column_unsign, signs, unsign
from manyhands.core.codec import Codec, CodecTraits
from manyhands.core.errors import BadPayload, refuse_unless

BLOCK = 4096
"""Numbers that share two means in a row without columns."""


@dataclass(frozen=True)
class OneBit:
    """A bit for each number.

    Args:
        block: how many neighbours share two means; 0: the columns of a matrix, and 4096 neighbours of any other tensor.
    """

    block: int = 0
    by_parameter: ClassVar[bool] = True
    traits: ClassVar[CodecTraits] = CodecTraits()

    def __post_init__(self) -> None:
        refuse_unless(self.block >= 0, "block", self.block, ">= 0")

    def memory(self, like: Tensor) -> None:
        """No memory; `Feedback` around it remembers the rounding error."""
        return None

    def encode(self, x: Tensor, memory: Tensor | None) -> tuple[Tensor, ...]:
        """The bits of all numbers, eight per byte, and the means: all u0, then all u1."""
        columns = self._columns(x)
        if not x.numel():
            return torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=wide(x.dtype))
        return column_signs(row(x), len(x), columns) if columns else signs(row(x), self._block(x))

    def decode(self, payload: Sequence[Tensor], out: Tensor) -> None:
        """The mean that each bit selects."""
        groups, columns = self._groups(out), self._columns(out)
        bits, means = expect(payload, (-(-out.numel() // 8), torch.uint8), (2 * groups, wide(out.dtype)))
        check_finite(means)
        check_spare(bits, out.numel(), 1, 0)
        if bool((means[:groups] > 0).any()) or bool((means[groups:] < 0).any()):
            raise BadPayload("a mean of negative numbers is positive, or a mean of positive ones negative")
        with row_of(out) as plain:
            if columns:
                column_unsign(bits, len(out), columns, means, plain)
            else:
                unsign(bits, self._block(out), means, plain)

    def nbytes(self, like: Tensor) -> int:
        """A bit per number, and two means per group."""
        return -(-like.numel() // 8) + 2 * self._groups(like) * wide(like.dtype).itemsize

    def _columns(self, x: Tensor) -> int:
        """The number of columns that share means; 0 if blocks do."""
        columns = x.numel() // len(x) if x.dim() > 1 and x.numel() else 0
        return columns if columns > 1 and not self.block else 0

    def _block(self, x: Tensor) -> int:
        """The length of a block; a matrix of one column is one block."""
        return self.block or (BLOCK if x.dim() < 2 else max(1, x.numel()))

    def _groups(self, x: Tensor) -> int:
        """The number of pairs of means."""
        return self._columns(x) or -(-x.numel() // self._block(x))


EXAMPLES: Mapping[str, Codec] = {"one bit": OneBit(), "one bit in blocks": OneBit(100)}
