"""Fold: make any number of ranks a power of two, for algorithms that pair ranks by flipping a bit.

With P = 6 the first 2 (P - 4) places pair up; the even ones hand over their `x` and sit out:

    places    0 → 1    2 → 3    4    5
    inner         0        1    2    3       the algorithm runs on these
    places    0 ← 1    2 ← 3

That costs 2 rounds and twice m elements more than the power of two below P.

Lending: who sits out lends `x` and gets an answer. The answer must be lent from memory that stays as it is; its
receiver has released it when it hands over its next `x`.
"""

from __future__ import annotations

from torch import Tensor

from manyhands.topology.collectives.group import Group


class Fold:
    """A group's places folded to a power of two."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self.power = 1 << (group.size.bit_length() - 1)
        self._spare = group.size - self.power
        paired = group.place < 2 * self._spare
        self.companion = group.place ^ 1 if paired else None
        self._sits_out = paired and group.place % 2 == 0
        self.inner = group.place // 2 if paired else group.place - self._spare

    def outer(self, inner: int) -> int:
        """The place of one that takes part."""
        return 2 * inner + 1 if inner < self._spare else inner + self._spare

    def enter(self, x: Tensor) -> bool:
        """Whether this place takes part; `x` then holds its companion's share too, else it already has the sum."""
        if self.companion is not None and self._sits_out:
            self._group.send(self.companion, x)
            self._group.take(self.companion, x)
        elif self.companion is not None:
            self._group.add(self.companion, x)
        return not self._sits_out

    def leave(self, total: Tensor) -> None:
        """Tell the companion the sum, in memory that is not written before the next call."""
        if self.companion is not None:
            self._group.send(self.companion, total)
