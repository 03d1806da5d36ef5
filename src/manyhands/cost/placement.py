"""Placement: what each layer of a model sends if it is divided by samples or by neurons, and the cheapest of all plans.

Bytes are those that one of P ranks sends in a step in which every rank has a mini-batch of b samples, T = P b together.
Only convolutions and fully connected layers are divided by neurons (cost/layer_split.py); the gradients of other
parameters are all-reduced in every plan. Layers are taken as a chain in the order of the model: skip connections are
not seen. Stages of consecutive layers (cost/chain_cut.py) are given for models that are a chain.
"""

from __future__ import annotations

from dataclasses import dataclass

from manyhands.core.errors import refuse_unless
from manyhands.cost.chain_cut import chain_cut
from manyhands.cost.layer_split import (
    LayerSize,
    Plan,
    Way,
    between,
    cheapest,
    data_wins_from,
    own,
    sent_of,
)
from manyhands.cost.layers import LayerCost, ModelCost

DIVISIBLE = ("convolution", "fully connected")


@dataclass(frozen=True)
class LayerPlacement:
    """What one layer sends in each way: bytes of a rank in a step; None: it cannot be divided so, or is not known.

    Nothing is sent behind a layer that is divided by its outputs, in front of one that is divided by its inputs.

    Args:
        name: its name in the model.
        kind: its kind, as in `LayerCost`.
        data: its gradient, all-reduced.
        gathered: divided by its outputs: these are gathered, and the errors of the next layer's inputs summed.
        summed: divided by its inputs: the partial sums of its outputs are added up, and so are their errors.
        examples: the inputs of all samples, gathered behind a layer that is divided by samples, and their errors.
        data_wins_from: the samples of a rank from which `data` is at most `gathered`.
        way: how the cheapest plan divides it.
        join: how the cheapest plan joins it to the next one; empty: not at all.
    """

    name: str
    kind: str
    data: float
    gathered: float | None
    summed: float | None
    examples: float | None
    data_wins_from: int | None
    way: Way
    join: str


@dataclass(frozen=True)
class StagePlacement:
    """The stages of a pipeline with one stage for each rank.

    Args:
        first: the first layer of each stage but the first.
        largest: what the largest stage has of the work, 1/P at best.
        bytes: the activations that pass all cuts for one sample; their errors are as many.
    """

    first: tuple[str, ...]
    largest: float
    bytes: float


@dataclass(frozen=True)
class Placement:
    """All layers with parameters.

    Args:
        layers: in the order of the model.
        ranks: P.
        batch_size: b, samples of a rank.
        data: bytes that a rank sends in a step if all layers are divided by samples.
        cheapest: the same in the cheapest plan.
        stages: of a model that is a chain; None: it is none, or it has fewer layers than there are ranks.
    """

    layers: tuple[LayerPlacement, ...]
    ranks: int
    batch_size: int
    data: float
    cheapest: float
    stages: StagePlacement | None


def placement(cost: ModelCost, ranks: int) -> Placement:
    """The bytes of every layer in each way, and the cheapest plan."""
    refuse_unless(ranks >= 2, "workers", ranks, ">= 2: one worker sends nothing")
    samples = cost.batch_size * ranks
    sizes = {layer.name: size for layer in cost.layers if (size := _size(layer)) is not None}
    chain = [one for one in sizes.values() if one.splits]
    plan = cheapest(chain, samples, ranks) if chain else Plan((), (), 0.0)
    names = (name for name, one in sizes.items() if one.splits)
    chosen = dict(zip(names, zip(plan.ways, plan.joins, strict=True), strict=True))
    kinds = {layer.name: layer.kind for layer in cost.layers}
    layers = [
        _layer(name, kinds[name], size, samples, ranks, *chosen.get(name, ("data", ""))) for name, size in sizes.items()
    ]
    rest = sent_of(sum(own(one, "data") for one in sizes.values() if not one.splits), ranks)
    everything = sent_of(sum(own(one, "data") for one in chain), ranks)
    return Placement(tuple(layers), ranks, cost.batch_size, everything + rest, plan.sent + rest, _stages(cost, ranks))


def _size(layer: LayerCost) -> LayerSize | None:
    """The bytes of a layer with parameters."""
    if not layer.parameters:
        return None
    known = layer.input_bytes is not None and layer.output_bytes is not None
    splits = known and layer.kind in DIVISIBLE
    return LayerSize(layer.weight_bytes, layer.input_bytes or 0, layer.output_bytes or 0, splits)


def _layer(name: str, kind: str, size: LayerSize, samples: int, ranks: int, way: Way, join: str) -> LayerPlacement:
    def bytes_of(way: Way, next_way: Way) -> float | None:
        return sent_of(samples * between(size, size, way, next_way), ranks) if size.splits else None

    return LayerPlacement(
        name,
        kind,
        sent_of(own(size, "data"), ranks),
        bytes_of("out", "out"),
        bytes_of("in", "out"),
        bytes_of("data", "out"),
        data_wins_from(size, ranks),
        way,
        join,
    )


def _stages(cost: ModelCost, ranks: int) -> StagePlacement | None:
    """Stages of about equal work between which few bytes pass."""
    layers = [layer for layer in cost.layers if layer.output_bytes is not None]
    trained = [layer.parameters > 0 for layer in layers]
    if not cost.is_chain or sum(trained) < ranks:
        return None
    work = [layer.work.total / cost.work.total for layer in layers]
    found = chain_cut(work, [layer.output_bytes or 0 for layer in layers], trained, ranks)
    return StagePlacement(tuple(layers[cut].name for cut in found.cuts), found.largest, found.bytes)
