"""PipeDream's partitioner: which layers form a stage, and how many machines replicate each stage.

Layer i computes for t_i seconds (both passes), has w_i bytes of parameters, and sends a_i bytes of activations to the
next one. The replicas of a stage divide the mini-batches among them and all-reduce their gradients. A pipeline is as
fast as its slowest stage or link:

    T(i..j, m)  =  1/m max( sum of t_i..t_j,  2 (m - 1) / B  sum of w_i..w_j )          layers i..j on m machines
    A(j, m)     =  min( T(0..j, m),  min over s < j, 1 <= q < m of  max( A(s, m - q),  2 a_s / B,  T(s+1..j, q) ) )

The last stage has the layers s+1..j and q machines; the activation of layer s and its error pass the link before it.

Reference: D. Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", 2019,
https://arxiv.org/abs/1806.03377.
Differs from the authors' code, which adds the two terms of T, the second one twice, and ignores the link unless
activations are compressed: we follow the paper, where computing and communication overlap. One level of machines.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import NamedTuple

from manyhands.core.errors import refuse_unless


class ReplicatedStage(NamedTuple):
    """Layers `first` to `last`, on so many machines."""

    first: int
    last: int
    replicas: int


Partition = tuple[float, list[ReplicatedStage]]
"""Seconds per mini-batch, and the stages."""


def partition(
    compute: Sequence[float],
    activations: Sequence[float],
    parameters: Sequence[float],
    bandwidth: float,
    machines: int,
) -> Partition:
    """The fastest pipeline over all machines; of equally fast ones that with the fewest stages.

    Args:
        compute: t, seconds of both passes by layer.
        activations: a, bytes that a layer sends to the next one.
        parameters: w, bytes of parameters by layer.
        bandwidth: B, bytes per second of each link.
        machines: how many there are; each is used.
    """
    layers = len(compute)
    refuse_unless(layers >= 1, "the number of layers", layers, ">= 1")
    for name, given in {"activations": activations, "parameters": parameters}.items():
        refuse_unless(len(given) == layers, f"the number of {name}", len(given), f"{layers}, one for each layer")
    refuse_unless(bandwidth > 0, "bandwidth", bandwidth, "> 0")
    refuse_unless(machines >= 1, "machines", machines, ">= 1")
    t, w = ([0.0, *accumulate(numbers)] for numbers in (compute, parameters))

    def stage(i: int, j: int, m: int) -> float:
        """T(i..j, m)."""
        return max(t[j + 1] - t[i], 2 * (m - 1) / bandwidth * (w[j + 1] - w[i])) / m

    @cache
    def best(j: int, m: int) -> tuple[float, int, list[ReplicatedStage]]:
        """A(j, m), with the number of stages and the stages."""
        options = [(stage(0, j, m), 1, [ReplicatedStage(0, j, m)])]
        for s in range(j):
            for q in range(1, m):
                before, count, stages = best(s, m - q)
                slowest = max(before, 2 * activations[s] / bandwidth, stage(s + 1, j, q))
                options.append((slowest, count + 1, [*stages, ReplicatedStage(s + 1, j, q)]))
        return min(options)

    cost, _, stages = best(layers - 1, machines)
    return cost, stages
