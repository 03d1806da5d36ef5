"""Presence: the sorted list of present ranks, of all roles and of each role.

Every rank asks for its peers often, and few ranks join or leave in between: so the lists are updated, not rebuilt.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Sequence


class Presence:
    """The ranks that have joined and have neither left nor been lost."""

    def __init__(self, roles: Sequence[str], pending_ranks: Collection[int]) -> None:
        self._roles = roles
        self._present: dict[str | None, list[int]] = {role: [] for role in (None, *roles)}
        for rank in range(len(roles)):
            if rank not in pending_ranks:
                self.join(rank)

    def join(self, rank: int) -> None:
        """Add a rank."""
        insort(self._present[None], rank)
        insort(self._present[self._roles[rank]], rank)

    def leave(self, rank: int) -> None:
        """Remove a rank; a second call does nothing."""
        for role in (None, self._roles[rank]):
            index, found = self._find(role, rank)
            if found:
                del self._present[role][index]

    def others(self, role: str | None, rank: int) -> list[int]:
        """The present ranks of this role, or of any, without `rank`."""
        index, found = self._find(role, rank)
        ranks = self._present.get(role, [])
        return ranks[:index] + ranks[index + found :]

    def _find(self, role: str | None, rank: int) -> tuple[int, bool]:
        """The index of a rank among those of a role, or where it would be inserted, and whether it is present."""
        ranks = self._present.get(role, [])
        index = bisect_left(ranks, rank)
        return index, ranks[index : index + 1] == [rank]
