"""L-BFGS: an approximate Newton direction, from the changes of the gradient along the last few steps.

    s_i = w_{i+1} - w_i,  y_i = g_{i+1} - g_i,  ρ_i = 1 / y_iᵀs_i

    q = g
    newest to oldest:  a_i = ρ_i s_iᵀq,  q <- q - a_i y_i
    q <- γ q,  γ = sᵀy / yᵀy of the newest pair
    oldest to newest:  b = ρ_i y_iᵀq,  q <- q + (a_i - b) s_i
    d = -q

Vectors are only named here. A `Space` stores them, possibly as shards on several machines, and returns only their dot
products. A pair is used only if sᵀy > 0, where the dot product is that of the whole vectors.

Reference: D. Liu, J. Nocedal, "On the limited memory BFGS method for large scale optimization", 1989,
https://doi.org/10.1007/BF01589116.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

FLAT = 1e-10
"""A smaller sᵀy is a rounding error and not curvature."""


class Space(Protocol):
    """Stores named vectors and operates on them."""

    def copy(self, x: str, into: str) -> None:
        """into <- x"""

    def scale(self, a: float, x: str) -> None:
        """x <- a x"""

    def add(self, a: float, x: str, to: str) -> None:
        """to <- to + a x"""

    def drop(self, x: str) -> None:
        """Delete x, which is not used any more."""

    def dot(self, x: str, y: str) -> float:
        """xᵀy"""


class Pair(NamedTuple):
    """A step and the change of the gradient along it, with their dot products."""

    number: int
    sy: float
    yy: float

    @property
    def s(self) -> str:
        return f"s{self.number}"

    @property
    def y(self) -> str:
        return f"y{self.number}"


@dataclass
class History:
    """The newest pairs, oldest first.

    Args:
        size: m, the number of pairs; with 0 the direction is that of steepest descent.
    """

    size: int
    pairs: list[Pair] = field(default_factory=list)
    _made: int = field(default=0, init=False, repr=False)

    def learn(self, space: Space, t: float, old: str, new: str) -> None:
        """Add the step t d, along which the gradient changed from `old` to `new`."""
        if not self.size:
            return
        fresh = Pair(self._made, 0.0, 0.0)
        space.copy("d", fresh.s)
        space.scale(t, fresh.s)
        space.copy(new, fresh.y)
        space.add(-1.0, old, fresh.y)
        pair = Pair(self._made, space.dot(fresh.s, fresh.y), space.dot(fresh.y, fresh.y))
        self._made += 1
        self.pairs.append(pair)
        self._forget(space, self.pairs[: -self.size] if pair.sy > FLAT else [pair])

    def clear(self, space: Space) -> None:
        """Delete all pairs."""
        self._forget(space, self.pairs)

    def _forget(self, space: Space, pairs: Sequence[Pair]) -> None:
        for pair in list(pairs):
            space.drop(pair.s)
            space.drop(pair.y)
            self.pairs.remove(pair)

    def restore(self, pairs: Sequence[Pair]) -> None:
        """Continue with saved pairs, whose vectors the space already has."""
        self.pairs = list(pairs)
        self._made = 1 + max((pair.number for pair in pairs), default=-1)


def direction(space: Space, history: History, g: str) -> None:
    """d <- -H g, by the two-loop recursion."""
    pairs = history.pairs
    space.copy(g, "d")
    alphas = []
    for pair in reversed(pairs):
        alphas.append(space.dot(pair.s, "d") / pair.sy)
        space.add(-alphas[-1], pair.y, "d")
    if pairs:
        space.scale(pairs[-1].sy / pairs[-1].yy, "d")
    for pair, a in zip(pairs, reversed(alphas), strict=True):
        b = space.dot(pair.y, "d") / pair.sy
        space.add(a - b, pair.s, "d")
    space.scale(-1.0, "d")
