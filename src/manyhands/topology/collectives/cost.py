"""What an all-reduce costs, by the closed forms of the textbook network.

    L latency of a message, G seconds per byte, γ bytes per element, m elements, P ranks, lg = logarithm to base 2

    tree           2 L lg P    + 2 γ m G lg P
    butterfly        L lg P    +   γ m G lg P
    ring           2 L (P - 1) + 2 γ m G (P - 1) / P
    rabenseifner   2 L lg P    + 2 γ m G (P - 1) / P
    lower bound      L lg P    + 2 γ m G (P - 1) / P      no algorithm can be faster

Additions are free here. The virtual world takes exactly these times when P is a power of two that divides m.
Butterfly and Rabenseifner cost the same when γ m G / L = lg P / (lg P - 2 (P - 1) / P).

Reference: E. Chan et al., "Collective communication: theory, practice, and experience", 2007,
https://doi.org/10.1002/cpe.1206.
"""

from __future__ import annotations

import math

from manyhands.core.errors import refuse_unless


def all_reduce_seconds(algorithm: str, P: int, m: int, *, L: float, G: float, γ: int = 4) -> float:
    """Seconds of one all-reduce; `algorithm` is a name of the table above."""
    refuse_unless(P >= 1, "ranks", P, ">= 1")
    lg, ends = math.log2(P), 2 * (P - 1) / P
    terms = {
        "tree": (2 * lg, 2 * lg),
        "butterfly": (lg, lg),
        "ring": (2 * (P - 1), ends),
        "rabenseifner": (2 * lg, ends),
        "lower bound": (lg, ends),
    }
    refuse_unless(algorithm in terms, "algorithm", algorithm, f"one of {', '.join(terms)}")
    rounds, vectors = terms[algorithm]
    return rounds * L + vectors * γ * m * G


def crossover(P: int) -> float:
    """The γ m G / L above which Rabenseifner beats the butterfly; infinite up to P = 2, where it never does."""
    refuse_unless(P >= 1, "ranks", P, ">= 1")
    lg = math.log2(P)
    saved = lg - 2 * (P - 1) / P
    return lg / saved if saved > 0 else math.inf
