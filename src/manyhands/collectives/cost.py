"""The cost of an all-reduce, by the closed forms of the textbook network.

    L latency of a message, G seconds per byte, γ bytes per element, m elements, P ranks, lg = logarithm to base 2

    tree           2 L lg P    + 2 γ m G lg P
    butterfly        L lg P    +   γ m G lg P
    ring           2 L (P - 1) + 2 γ m G (P - 1) / P
    rabenseifner   2 L lg P    + 2 γ m G (P - 1) / P
    lower bound      L lg P    + 2 γ m G (P - 1) / P      no algorithm can be faster

Additions are free here. The virtual world takes exactly these times when P is a power of two that divides m.
Butterfly and Rabenseifner cost the same when γ m G / L = lg P / (lg P - 2 (P - 1) / P).

Bytes in and out of one machine per step, for a parameter of w bytes of which a mini-batch touches the fraction α of
rows (N machines, each with a worker and an even share of the shards; row numbers not counted):

    dense                4 w (N - 1) / N       ring, Rabenseifner, or shards
    sparse, shards       4 α w (N - 1) / N     rows are pushed, rows are pulled
    sparse, all-gather   2 α w (N - 1)         each machine gets the rows of all: the same for N = 2, more for N > 2
    dense, one server    2 w (N - 1)           that machine alone

The same in elements, for the weight of a linear layer, M x N, whose factors have K rows on each of P workers (see
strategies/factors/linear_layer.py), with S servers that have even shares of the weights:

    factors              2 K (P - 1) (M + N)        a worker: each gets the factors of all others
    server               2 M N                      a worker whose servers are on other machines
    server beside it     2 M N (P + S - 2) / S      a worker with one of the servers on its machine
    adam                 K (M + N) + M N            a worker: factors are pushed, weights are pulled
    adam, the server     P (K (M + N) + M N)        if there is one

Factors pay if a worker moves no more with them than with servers beside all workers (S = P): K (M + N) <= 2 M N / P.
Their cost
grows with the square of P, since each worker has P - 1 others; that of a sum does not.

Reference: E. Chan et al., "Collective communication: theory, practice, and experience", 2007,
https://doi.org/10.1002/cpe.1206; for sparse parameters: S. Kim et al., "Parallax", 2018, arXiv:1808.02621;
for factors: H. Zhang et al., "Poseidon: an efficient communication architecture for distributed deep learning on GPU
clusters", 2017, arXiv:1706.03292; T. Chilimbi et al., "Project Adam: building an efficient and scalable deep learning
training system", 2014.
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


def machine_bytes(how: str, N: int, w: float, α: float = 1.0) -> float:
    """Bytes in and out of one machine per step; `how` is a name of the second table above."""
    refuse_unless(N >= 1, "machines", N, ">= 1")
    refuse_unless(0 <= α <= 1, "the fraction of rows", α, ">= 0 and <= 1")
    terms = {
        "dense": 4 * w * (N - 1) / N,
        "sparse, shards": 4 * α * w * (N - 1) / N,
        "sparse, all-gather": 2 * α * w * (N - 1),
        "dense, one server": 2 * w * (N - 1),
    }
    refuse_unless(how in terms, "how", how, f"one of {'; '.join(terms)}")
    return terms[how]


def layer_elements(how: str, M: int, N: int, *, K: float, P: int, S: int = 1) -> float:
    """Elements in and out per step for the weight of a linear layer; `how` is a name of the third table above."""
    refuse_unless(P >= 1, "workers", P, ">= 1")
    refuse_unless(S >= 1, "servers", S, ">= 1")
    terms = {
        "factors": 2 * K * (P - 1) * (M + N),
        "server": 2 * M * N,
        "server beside it": 2 * M * N * (P + S - 2) / S,
        "adam": K * (M + N) + M * N,
        "adam, the server": P * (K * (M + N) + M * N),
    }
    refuse_unless(how in terms, "how", how, f"one of {'; '.join(terms)}")
    return terms[how]


def factors_pay(M: int, N: int, *, K: float, P: int) -> bool:
    """Whether a worker moves no more elements with factors than with a server beside each worker."""
    return layer_elements("factors", M, N, K=K, P=P) <= layer_elements("server beside it", M, N, K=K, P=P, S=P)
