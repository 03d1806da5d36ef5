"""Presence: which ranks are there right now, in order, all of them and those of each role.

Everyone asks for its peers, and each time but few have come or gone: so the lists are kept, and not made anew.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Sequence


class Presence:
    """The ranks that have come and neither left nor were lost."""

    def __init__(self, roles: Sequence[str], late: Collection[int]) -> None:
        self._roles = roles
        self._here: dict[str | None, list[int]] = {role: [] for role in (None, *roles)}
        for rank in range(len(roles)):
            if rank not in late:
                self.come(rank)

    def come(self, rank: int) -> None:
        """A rank is there from now on."""
        insort(self._here[None], rank)
        insort(self._here[self._roles[rank]], rank)

    def go(self, rank: int) -> None:
        """It is no longer there; it may say so twice."""
        for role in (None, self._roles[rank]):
            place, found = self._find(role, rank)
            if found:
                del self._here[role][place]

    def others(self, role: str | None, rank: int) -> list[int]:
        """All that are there and have this role, or any, but one."""
        place, found = self._find(role, rank)
        ranks = self._here.get(role, [])
        return ranks[:place] + ranks[place + found :]

    def _find(self, role: str | None, rank: int) -> tuple[int, bool]:
        """Where it stands, or would stand, among those of a role, and whether it does."""
        ranks = self._here.get(role, [])
        place = bisect_left(ranks, rank)
        return place, ranks[place : place + 1] == [rank]
