"""Stash: the backward pass of a micro-batch sees the very weights of its forward pass (PipeDream).

A copy of the weights is kept per version, from the first F that uses it to the last B; micro-batches of
one version share it. At stage s of K there are at most K - s versions.
"""

from __future__ import annotations

from torch import Tensor


class Stash:
    """Copies of the weights, by version."""

    def __init__(self) -> None:
        self.version = 0
        self._copies: dict[int, list[Tensor]] = {}
        self._used: dict[int, int] = {}

    def forward(self, m: int, live: list[Tensor]) -> list[Tensor]:
        """The weights that F(m) and B(m) compute with: a copy of the newest."""
        if self.version not in self._copies:
            self._copies[self.version] = [x.detach().clone().requires_grad_() for x in live]
        self._used[m] = self.version
        return self._copies[self.version]

    def updated(self) -> None:
        """The live weights have moved on: copies that no micro-batch in flight uses can go."""
        self.version += 1
        used = set(self._used.values())
        self._copies = {version: copy for version, copy in self._copies.items() if version in used}

    def done(self, m: int) -> int:
        """B(m) is over; how many updates its weights were behind."""
        return self.version - self._used.pop(m)

    @property
    def kept(self) -> int:
        """How many versions are kept right now."""
        return len(self._copies)
