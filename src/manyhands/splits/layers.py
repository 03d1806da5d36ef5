"""Pipeline stages: an `nn.Sequential` cut into contiguous stages of about equal size.

The size of the largest stage is minimal (dynamic programming over the last cut):

    cost(j, k) = min over i < j of max(cost(i, k - 1), size of layers i .. j-1)
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise

from torch import nn

from manyhands.core.errors import Refused, refuse_unless


def stages(model: nn.Module, count: int) -> list[nn.Sequential]:
    """Cut a Sequential into `count` stages, each with at least one layer that has parameters."""
    if not isinstance(model, nn.Sequential):
        raise Refused(f"the model is a {type(model).__name__}, but a pipeline needs an nn.Sequential")
    sizes = [sum(p.numel() for p in layer.parameters()) for layer in model]
    trainable = sum(1 for size in sizes if size)
    refuse_unless(
        count <= trainable, "the number of stages", count, f"<= {trainable}, the number of layers with parameters"
    )
    cuts = [0, *_cuts(tuple(sizes), count), len(sizes)]
    cut = [nn.Sequential(*list(model)[start:stop]) for start, stop in pairwise(cuts)]
    _refuse_ties(cut)
    return cut


def _cuts(sizes: tuple[int, ...], count: int) -> list[int]:
    """The first layers of stages 1, 2, ..."""

    @cache
    def best(stop: int, stages: int) -> tuple[float, tuple[int, ...]]:
        if stages == 1:
            return (sum(sizes[:stop]) or float("inf")), ()
        options = []
        for start in range(stages - 1, stop):
            size = sum(sizes[start:stop])
            if size:
                below, cuts = best(start, stages - 1)
                options.append((max(below, size), (*cuts, start)))
        return min(options, default=(float("inf"), ()))

    return list(best(len(sizes), count)[1])


def _refuse_ties(cut: list[nn.Sequential]) -> None:
    owner: dict[int, int] = {}
    for s, stage in enumerate(cut):
        for name, p in stage.named_parameters():
            if owner.setdefault(id(p), s) != s:
                raise Refused(f"{name} of stage {s} is tied to stage {owner[id(p)]}, but stages must not share weights")
