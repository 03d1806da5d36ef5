"""Mixing weights W_ij, with which rank i averages its neighbours j, when all ranks average at the same time.

    W_ij = 1 / (1 + max(d_i, d_j))      i and j are neighbours; d: the degree of a rank
    W_ii = 1 - sum_j W_ij

            0     1     2     3
      0  [ 1/3   1/3    .    1/3 ]      W of a ring of four
      1  [ 1/3   1/3   1/3    .  ]
      2  [  .    1/3   1/3   1/3 ]
      3  [ 1/3    .    1/3   1/3 ]

W is symmetric and its rows and columns sum to one, so averaging keeps the mean. If all ranks have the same degree, all
weights are equal: 1/3 in a ring, 1/5 in a torus (of at least three rows and three columns), 1/P in a complete graph.

These are the Metropolis-Hastings weights: L. Xiao, S. Boyd, S. Lall, "Distributed average consensus with time-varying
Metropolis weights", 2006, https://stanford.edu/~boyd/papers/avg_metropolis.html.
"""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from functools import lru_cache

from manyhands.peers.graphs import neighbours


def mixing(graph: str, rank: int, size: int, seed: int = 0) -> dict[int, float]:
    """The nonzero entries of a rank's row of W by rank: its neighbours and itself, in order of rank."""
    others = neighbours(graph, rank, size, seed)
    degrees = _degrees(graph, size, seed)
    divisors = {other: 1 + max(degrees[rank], degrees[other]) for other in others}
    given = sum((Fraction(times, n) for n, times in Counter(divisors.values()).items()), Fraction())
    row = {rank: float(1 - given), **{other: 1 / n for other, n in divisors.items()}}
    return dict(sorted(row.items()))


@lru_cache(maxsize=8)
def _degrees(graph: str, size: int, seed: int) -> list[int]:
    """The number of neighbours of each rank."""
    return [len(neighbours(graph, rank, size, seed)) for rank in range(size)]
