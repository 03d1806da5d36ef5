"""Layer split: which layers are divided among P ranks by samples, and which by neurons, so that few bytes are sent.

A layer of |w| weights takes N_in numbers of each of T samples and returns N_out. It can be computed in three ways:

    data   every rank has all weights and T / P samples         its gradient is all-reduced: 2 |w|
    out    every rank has 1/P of the outputs (rows of W)         it needs whole inputs, and returns a slice
    in     every rank has 1/P of the inputs (columns of W)       it needs a slice, and returns a partial sum

What lies between two layers follows from their ways; N numbers for each sample, forward + backward:

    before    next: data                  out                              in                            loss
    data      -                           examples gathered: N + N         examples gathered: N + N      -
    out       examples scattered: N + N   gathered: N + N                  kept apart: 0                 gathered: N
    in        examples scattered: N + N   summed: 2N + 2N                  summed: 2N, gathered: N       summed: 2N

An all-gather or a reduce-scatter of m numbers counts m, an all-reduce 2 m; a rank sends (P - 1) / P of that. The
first layer's input needs no error. N is N_in of the next layer where examples are gathered, elsewhere N_out of the one
before.

So 2 |w| does not depend on the mini-batch, and what is sent of activations grows with it: convolutions, with few
weights and large outputs, are divided by samples, and fully connected layers by neurons, until T is large.

`cheapest` finds the plan with the fewest numbers, by dynamic programming over what a layer leaves behind:

    C(l, way) = own(l, way) + min over ways v of the layer before of  C(l - 1, v) + T between(v, way)

Reference: J. Dean et al., "Large scale distributed deep networks", 2012 (out, gathered); A. Krizhevsky, "One weird
trick for parallelizing convolutional neural networks", 2014, https://arxiv.org/abs/1404.5997 (data, then out);
M. Shoeybi et al., "Megatron-LM", 2019, https://arxiv.org/abs/1909.08053 (out kept apart, in summed).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import ceil
from typing import Literal, NamedTuple

from manyhands.core.errors import refuse_unless

Way = Literal["data", "out", "in"]
END = "loss"
WAYS: tuple[Way, ...] = ("data", "out", "in")
GATHER_EXAMPLES, SCATTER_EXAMPLES = "examples gathered", "examples scattered"

BETWEEN: dict[tuple[Way, str], tuple[str, int]] = {
    ("data", "data"): ("", 0),
    ("data", "out"): (GATHER_EXAMPLES, 2),
    ("data", "in"): (GATHER_EXAMPLES, 2),
    ("data", END): ("", 0),
    ("out", "data"): (SCATTER_EXAMPLES, 2),
    ("out", "out"): ("gathered", 2),
    ("out", "in"): ("kept apart", 0),
    ("out", END): ("gathered", 1),
    ("in", "data"): (SCATTER_EXAMPLES, 2),
    ("in", "out"): ("summed", 4),
    ("in", "in"): ("summed", 3),
    ("in", END): ("summed", 2),
}
"""By the way of a layer and that of the next: how they are joined, and how many times N numbers that is."""


class LayerSize(NamedTuple):
    """What a layer has, in numbers or in bytes.

    Args:
        weights: |w|.
        inputs: N_in, for one sample.
        outputs: N_out, for one sample.
        splits: whether it can be divided by neurons.
    """

    weights: float
    inputs: float
    outputs: float
    splits: bool = True


class Plan(NamedTuple):
    """The way of each layer, how it is joined to the next, and the size of all that a rank sends in a step."""

    ways: tuple[Way, ...]
    joins: tuple[str, ...]
    sent: float


def own(layer: LayerSize, way: Way) -> float:
    """What the gradient of a layer's weights takes."""
    return 2 * layer.weights if way == "data" else 0.0


def between(layer: LayerSize, following: LayerSize | None, way: Way, next_way: str) -> float:
    """What one sample takes between a layer and the next, in both passes."""
    numbers = following.inputs if way == "data" and following is not None else layer.outputs
    return BETWEEN[way, next_way][1] * numbers


def sent(layers: Sequence[LayerSize], ways: Sequence[Way], samples: float, ranks: int) -> float:
    """What a rank sends in a step of `samples` samples, if the layers are computed in these ways."""
    following, next_ways = [*layers[1:], None], [*ways[1:], END]
    each = sum(own(layer, way) for layer, way in zip(layers, ways, strict=True))
    joins = zip(layers, following, ways, next_ways, strict=True)
    return sent_of(each + samples * sum(between(*one) for one in joins), ranks)


def sent_of(numbers: float, ranks: int) -> float:
    """What one of P ranks sends of the numbers of a collective: (P - 1) / P."""
    return numbers * (ranks - 1) / ranks


def possible(layer: LayerSize) -> tuple[Way, ...]:
    """The ways in which a layer can be computed."""
    return WAYS if layer.splits else ("data",)


def cheapest(layers: Sequence[LayerSize], samples: float, ranks: int) -> Plan:
    """The plan in which a rank sends the least; of equal ones that with more layers divided by samples.

    Args:
        layers: in the order in which they are computed.
        samples: T, of a step of all ranks together.
        ranks: P.
    """
    refuse_unless(ranks >= 1, "ranks", ranks, ">= 1")
    refuse_unless(len(layers) >= 1, "the number of layers", len(layers), ">= 1")
    best: dict[Way, tuple[float, tuple[Way, ...]]] = {way: (own(layers[0], way), (way,)) for way in possible(layers[0])}
    for layer, following in pairwise(layers):
        best = {
            way: min(
                (cost + samples * between(layer, following, before, way) + own(following, way), (*ways, way))
                for before, (cost, ways) in best.items()
            )
            for way in possible(following)
        }
    last = layers[-1]
    _, ways = min((cost + samples * between(last, None, way, END), ways) for way, (cost, ways) in best.items())
    joins = tuple(BETWEEN[pair][0] for pair in zip(ways, (*ways[1:], END), strict=True))
    return Plan(ways, joins, sent(layers, ways, samples, ranks))


def data_wins_from(layer: LayerSize, ranks: int) -> int | None:
    """The samples of a rank from which the gradient takes no more than gathering the outputs and their errors.

    None: always, because the layer cannot be divided by neurons.
    """
    if not layer.splits:
        return None
    return max(1, ceil(own(layer, "data") / (ranks * between(layer, layer, "out", "out"))))
