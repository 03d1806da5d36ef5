"""Others: a row of ranks without some of them. Only those that are missing are noted down, as places of the row.

    row       0  1  2  3  4  5  6        missing: 2 and 5
    others    0  1     3  4     6        the third of them, counted from 0, is 4

Everyone has such a row of everyone else, and a list for each would take memory by the square of their number.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from random import Random


class Others:
    """Ranks in order, from which one after the other is taken out."""

    def __init__(self, row: Sequence[int], missing: Iterable[int] = ()) -> None:
        self._row = row
        self._missing = list(missing)

    def __len__(self) -> int:
        return len(self._row) - len(self._missing)

    def copy(self) -> Others:
        """The same ranks, to be taken out independently."""
        return Others(self._row, self._missing)

    def remove(self, rank: int) -> None:
        """Take out a rank, if it is here."""
        if rank in self._row:
            place = self._row.index(rank)
            found = bisect_left(self._missing, place)
            if self._missing[found : found + 1] != [place]:
                self._missing.insert(found, place)

    def pop(self, place: int) -> int:
        """Take out the rank that has this place among those that are left."""
        for missing in self._missing:
            if missing > place:
                break
            place += 1
        insort(self._missing, place)
        return self._row[place]


def shuffled(others: Others, draw: Random) -> Iterator[int]:
    """All of them in random order, drawn one by one: mostly the first is enough."""
    left = others.copy()
    while left:
        yield left.pop(draw.randrange(len(left)))
