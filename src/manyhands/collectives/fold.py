"""Fold: make any number of ranks a power of two, for algorithms that pair ranks by flipping a bit.

With P = 6 the first 2 (P - 4) indices form pairs; the even ones send their `x` to the odd ones and do not take part:

    indices   0 → 1    2 → 3    4    5
    inner         0        1    2    3       the algorithm runs on these
    indices   0 ← 1    2 ← 3

That costs 2 rounds and twice m elements more than the power of two below P.

Lending: a rank that does not take part lends `x` and gets an answer. The answer must be lent from memory that is not
changed; its receiver has released it when it sends its next `x`.
"""

from __future__ import annotations

from torch import Tensor

from manyhands.collectives.group import RankGroup
from manyhands.core.port import ReduceOp


class Fold:
    """A group's indices folded to a power of two."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self.power = 1 << (group.size.bit_length() - 1)
        self._spare = group.size - self.power
        paired = group.index_in_group < 2 * self._spare
        self.companion = group.index_in_group ^ 1 if paired else None
        self.takes_part = not paired or group.index_in_group % 2 == 1
        self.inner = group.index_in_group // 2 if paired else group.index_in_group - self._spare

    def outer(self, inner: int) -> int:
        """The index in the group of one that takes part."""
        return 2 * inner + 1 if inner < self._spare else inner + self._spare

    def first(self, inner: int) -> int:
        """The first index for which an inner one stands: its companion's, if it has one."""
        return 2 * inner if inner < self._spare else inner + self._spare

    def enter(self, x: Tensor, op: ReduceOp = "sum") -> bool:
        """Whether this index takes part; `x` then contains its companion's too, else it already is the result."""
        if self.companion is not None and not self.takes_part:
            self._group.send(self.companion, x)
            self._group.copy_into(self.companion, x)
        elif self.companion is not None:
            self._group.reduce_into(self.companion, x, op)
        return self.takes_part

    def leave(self, total: Tensor) -> None:
        """Send the result to the companion, in memory that is not written before the next call."""
        if self.companion is not None:
            self._group.send(self.companion, total)
