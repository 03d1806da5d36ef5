"""Peer graphs: which ranks exchange models. All are symmetric, connected, and without loops.

    ring, P = 6           torus, P = 12 = 3 x 4       exponential, P = 8: neighbours of rank 0

    0 - 1 - 2             0 - 1 - 2 - 3 -             0   1   2   .   4   .   6   7
    |       |             |   |   |   |                   +1  +2      +4      -2  -1
    5 - 4 - 3             4 - 5 - 6 - 7 -
                          |   |   |   |               complete: all ranks are neighbours
                          8 - 9 -10 -11 -             random: the union of two rings, each in an
                          |   |   |   |               order that is drawn from the seed

                  neighbours    diameter        bipartite
    ring          2             P / 2           if P is even
    torus         4             about √P        if rows and columns are even, or fewer than three
    exponential   about 2 lg P  about lg P / 2  only up to P = 2
    complete      P - 1         1               only up to P = 2
    random        2 to 4        about lg P      rarely

A torus has as many rows as the largest divisor of P up to √P; for a prime that is one row, a ring. A random graph is
connected because each of its rings is; where the two have an edge in common a rank has fewer than four neighbours. The
smaller the diameter, the faster models mix; the fewer neighbours, the cheaper a round.

References: B. Ying et al., "Exponential graph is provably efficient for decentralized deep learning", 2021,
https://arxiv.org/abs/2110.13363; bipartite graphs against deadlock in pairwise averaging: X. Lian et al.,
"Asynchronous decentralized parallel stochastic gradient descent", 2018, https://arxiv.org/abs/1710.06952.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import lru_cache
from random import Random

from manyhands.core.errors import Refused, refuse_unless


def ring(rank: int, size: int, seed: int) -> Iterable[int]:
    """The ranks at distance 1."""
    return rank - 1, rank + 1


def complete(rank: int, size: int, seed: int) -> Iterable[int]:
    """All ranks are neighbours."""
    return range(size)


def exponential(rank: int, size: int, seed: int) -> Iterable[int]:
    """The ranks at distances 1, 2, 4, ... on a ring."""
    steps = [1 << j for j in range((size - 1).bit_length())]
    return [rank + sign * step for step in steps for sign in (-1, 1)]


def torus(rank: int, size: int, seed: int) -> Iterable[int]:
    """The ranks at distance 1 in the same row and in the same column."""
    columns = size // rows(size)
    row, column = divmod(rank, columns)
    sideways = [row * columns + (column + step) % columns for step in (-1, 1)]
    return [rank - columns, rank + columns, *sideways]


def rows(size: int) -> int:
    """The number of rows of a torus: the largest divisor of its size that is at most the root."""
    return next(number for number in range(math.isqrt(size), 0, -1) if size % number == 0)


def random(rank: int, size: int, seed: int) -> Iterable[int]:
    """The ranks at distance 1 in two rings that are drawn from the seed."""
    return [ring[(ring.index(rank) + step) % size] for ring in _rings(size, seed) for step in (-1, 1)]


@lru_cache(maxsize=8)
def _rings(size: int, seed: int) -> list[list[int]]:
    """Two random orders of all ranks, which are equal on every rank."""
    draw = Random(f"{seed}/rings/{size}")
    return [draw.sample(range(size), size) for _ in range(2)]


GRAPHS: dict[str, Callable[[int, int, int], Iterable[int]]] = {
    "ring": ring,
    "complete": complete,
    "exponential": exponential,
    "torus": torus,
    "random": random,
}


def neighbours(graph: str, rank: int, size: int, seed: int = 0) -> list[int]:
    """The sorted neighbours of `rank` in a graph of `size` ranks; only a random graph uses the seed."""
    refuse_unless(graph in GRAPHS, "graph", graph, f"one of {', '.join(GRAPHS)}")
    refuse_unless(0 <= rank < size, "rank", rank, f"0 to {size - 1}")
    return sorted({one % size for one in GRAPHS[graph](rank, size, seed)} - {rank})


def sides(graph: str, size: int, seed: int = 0) -> tuple[list[int], list[int]]:
    """The two sides of a bipartite graph; rank 0 is in the first."""
    side, line = {0: 0}, [0]
    for rank in line:
        for other in neighbours(graph, rank, size, seed):
            if other not in side:
                side[other] = 1 - side[rank]
                line.append(other)
            elif side[other] == side[rank]:
                raise Refused(f"a {graph} of {size} ranks is not bipartite: {rank} and {other} fall on one side")
    first, second = ([rank for rank in range(size) if side[rank] == which] for which in (0, 1))
    return first, second
