"""Pipeline stages: an `nn.Sequential` cut into contiguous stages of about equal work.

The work of the largest stage is minimal (dynamic programming over the last cut):

    cost(j, k) = min over i < j of max(cost(i, k - 1), work of layers i .. j-1)

Work is the operations of both passes (core/work.py). It is counted if a task has built the model. In an own loop it is
estimated from the parameters, because there no sample is known before the first step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise

from torch import nn

from manyhands.core.errors import refuse_unless
from manyhands.core.work import work_of


def stages(model: nn.Sequential, count: int) -> list[nn.Sequential]:
    """Cut a Sequential into `count` stages, each with at least one layer that has parameters."""
    has_parameters = tuple(any(True for _ in layer.parameters()) for layer in model)
    layers = sum(has_parameters)
    refuse_unless(count <= layers, "the number of stages", count, f"<= {layers}, the number of layers with parameters")
    _, first = balanced_cuts(_layer_work(model), has_parameters, count)
    cuts = [0, *first, len(model)]
    return [nn.Sequential(*list(model)[start:stop]) for start, stop in pairwise(cuts)]


def _layer_work(model: nn.Sequential) -> tuple[float, ...]:
    """Operations of both passes for one sample, by layer."""
    work = dict.fromkeys((name for name, _ in model.named_children()), 0.0)
    for name, one in work_of(model).modules.items():
        layer = name.partition(".")[0]
        if layer in work:  # a Sequential with a forward pass of its own may compute products outside its layers
            work[layer] += one.total
    return tuple(work.values())


def balanced_cuts(work: Sequence[float], has_parameters: Sequence[bool], count: int) -> tuple[float, tuple[int, ...]]:
    """The work of the largest stage, and the first layers of stages 1, 2, ...; infinity and none if there are none."""
    below_work, below_parameters = [0.0, *accumulate(work)], [0, *accumulate(map(int, has_parameters))]

    @cache
    def best(stop: int, stages: int) -> tuple[float, tuple[int, ...]]:
        options: list[tuple[float, tuple[int, ...]]] = []
        for start in range(stages - 1, stop) if stages > 1 else (0,):
            if below_parameters[start] < below_parameters[stop]:
                below, cuts = best(start, stages - 1) if stages > 1 else (0.0, ())
                option = max(below, below_work[stop] - below_work[start])
                options.append((option, (*cuts, start) if stages > 1 else ()))
        return min(options, default=(float("inf"), ()))

    return best(len(work), count)
