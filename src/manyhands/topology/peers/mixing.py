"""Mixing weights: how much a peer thinks of each neighbour, W_ij, when all average with all their neighbours at once.

    W_ij = 1 / (1 + max(d_i, d_j))      i and j are neighbours; d: how many neighbours a rank has
    W_ii = 1 - sum_j W_ij

            0     1     2     3
      0  [ 1/3   1/3    .    1/3 ]      W of a ring of four
      1  [ 1/3   1/3   1/3    .  ]
      2  [  .    1/3   1/3   1/3 ]
      3  [ 1/3    .    1/3   1/3 ]

Rows and columns sum to one, so averaging keeps the mean; W is symmetric, so nobody's word counts more than another's.
Where all have equally many neighbours, all weights are equal: 1/3 in a ring, 1/5 in a torus (if it has three rows and
three columns), 1/P if everyone knows everyone.

These are the Metropolis-Hastings weights: L. Xiao, S. Boyd, S. Lall, "Distributed average consensus with time-varying
Metropolis weights", 2006, https://stanford.edu/~boyd/papers/avg_metropolis.html.
"""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from functools import lru_cache

from manyhands.topology.peers.graphs import neighbours


def mixing(graph: str, rank: int, size: int, seed: int = 0) -> dict[int, float]:
    """A rank's row of W: the weights of its neighbours and of itself, in order of rank; all others are zero."""
    others = neighbours(graph, rank, size, seed)
    degrees = _degrees(graph, size, seed)
    parts = {other: 1 + max(degrees[rank], degrees[other]) for other in others}
    given = sum((Fraction(times, n) for n, times in Counter(parts.values()).items()), Fraction())
    row = {rank: float(1 - given), **{other: 1 / n for other, n in parts.items()}}
    return dict(sorted(row.items()))


@lru_cache(maxsize=8)
def _degrees(graph: str, size: int, seed: int) -> list[int]:
    """How many neighbours each rank has."""
    return [len(neighbours(graph, rank, size, seed)) for rank in range(size)]
