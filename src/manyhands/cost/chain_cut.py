"""Chain cut: a chain of layers divided into stages of about equal work, with few bytes between the stages.

    layers      conv1   conv2   conv3   fc6   fc7   fc8
    work  w_i     3       9       7      2     1     1
    bytes a_i  290400   ...                                       of the activation behind layer i
    stages     [ conv1   conv2 ] [ conv3   fc6   fc7   fc8 ]

An activation passes a cut forward, its error passes it backward: both are a_i bytes for one sample. The cut is found in
two steps of dynamic programming over the last stage:

    W(j, k)  =  min over i < j of  max( W(i, k-1),  w_i + .. + w_{j-1} )           the smallest largest stage
    A(j, k)  =  min over i < j of  A(i, k-1) + a_{i-1}                             over stages of work <= slack W(n, K)

So work has a bound, and bytes are minimised subject to it. That needs no speeds of machines and links. Where these are
known, `splits/partition.py` minimises the time of the slowest stage or link, and replicates stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from math import inf
from typing import NamedTuple

from manyhands.core.errors import refuse_unless

SLACK = 1.1
"""How many times larger than necessary the largest stage may be, so that fewer bytes pass the cuts."""


class ChainCut(NamedTuple):
    """The first layers of stages 1, 2, ..., the work of the largest stage, and the bytes of all cuts, one way."""

    cuts: tuple[int, ...]
    largest: float
    bytes: float


def chain_cut(
    work: Sequence[float], activations: Sequence[float], trained: Sequence[bool], stages: int, slack: float = SLACK
) -> ChainCut:
    """The stages between which the fewest bytes pass, of those whose largest is not much larger than necessary.

    Args:
        work: w, by layer.
        activations: a, bytes that a layer sends to the next one.
        trained: whether a layer has parameters: every stage must have such a layer.
        stages: K.
        slack: the largest stage has at most this many times the work that is possible.
    """
    layers = len(work)
    for name, given in {"activations": activations, "trained": trained}.items():
        refuse_unless(len(given) == layers, f"the number of {name}", len(given), f"{layers}, one for each layer")
    most = sum(trained)
    refuse_unless(1 <= stages <= most, "the number of stages", stages, f"1 to {most}, the layers with parameters")
    refuse_unless(slack >= 1, "slack", slack, ">= 1")
    sums, counts = [0.0, *accumulate(work)], [0, *accumulate(map(int, trained))]

    def size(start: int, stop: int) -> float:
        """The work of a stage; infinite if it has nothing to train."""
        return sums[stop] - sums[start] if counts[start] < counts[stop] else inf

    smallest, _ = _best(layers, stages, lambda before, start, stop: max(before, size(start, stop)))
    bound = slack * smallest

    def passed(before: float, start: int, stop: int) -> float:
        fits = size(start, stop) <= bound
        return before + (activations[start - 1] if start else 0.0) if fits else inf

    fewest, cuts = _best(layers, stages, passed)
    largest = max(size(start, stop) for start, stop in zip((0, *cuts), (*cuts, layers), strict=True))
    return ChainCut(cuts, largest, fewest)


def _best(layers: int, stages: int, cost: Callable[[float, int, int], float]) -> tuple[float, tuple[int, ...]]:
    """The smallest cost of so many stages, and the cuts; `cost` adds a stage to the cost of those before it."""

    @cache
    def best(stop: int, count: int) -> tuple[float, tuple[int, ...]]:
        if count == 1:
            return cost(0.0, 0, stop), ()
        options = []
        for start in range(count - 1, stop):
            before, cuts = best(start, count - 1)
            options.append((cost(before, start, stop), (*cuts, start)))
        return min(options, default=(inf, ()))

    return best(layers, stages)
