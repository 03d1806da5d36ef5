"""Stage plan: the stages of a chain of layers and the replicas of each, by PipeDream's partitioner.

    t    seconds of both passes of a mini-batch: operations x samples / REFERENCE_FLOPS
    a    bytes that the next stage receives of a mini-batch
    w    bytes of the parameters that are trained

by group of layers: a layer with parameters, and those without that follow it. So every stage has parameters. Nothing is
measured: all ranks find the same plan, in virtual time too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from manyhands.core.errors import Refused, refuse_unless
from manyhands.core.port import REFERENCE_FLOPS
from manyhands.core.work import ModelWork, Work, complete, source_of
from manyhands.core.work_counter import SAMPLES, count_work
from manyhands.splits.cuts import is_chain
from manyhands.splits.partition import partition
from manyhands.splits.placeholder import tensors_in

Layers = dict[str, nn.Module]
"""By name."""


class ChainCosts(NamedTuple):
    """What the partitioner needs to know of each group of layers."""

    names: list[str]
    """Of the layers that begin the groups."""
    compute: list[float]
    activations: list[float]
    """0 behind the last group."""
    parameters: list[float]


class StagePlan(NamedTuple):
    """Where stages 1, 2, ... begin, and the ranks of each stage."""

    cut: tuple[str, ...]
    replicas: tuple[int, ...]


def stage_plan(model: nn.Module, workers: int, samples: int, bandwidth: float) -> StagePlan:
    """The fastest stages and replicas on so many workers.

    Args:
        model: an nn.Sequential; layers of those inside it count as its own.
        workers: how many ranks there are; each is used.
        samples: of a mini-batch.
        bandwidth: bytes per second of each link.
    """
    found, key = source_of(model).found, ("plan", workers, samples, bandwidth)
    if key not in found:
        names, t, a, w = chain_costs(model, samples)
        _, stages = partition(t, a, w, bandwidth, workers)
        found[key] = StagePlan(tuple(names[one.first] for one in stages[1:]), tuple(one.replicas for one in stages))
    plan: StagePlan = found[key]
    return plan


def chain_costs(model: nn.Module, samples: int) -> ChainCosts:
    """The seconds and bytes of each group of layers for a mini-batch of so many samples."""
    if not is_chain(model):
        raise Refused(
            f"replicas is 'planned', but the model is a {type(model).__name__}, and plans are made for the layers of "
            "an nn.Sequential: make it one, or give the numbers, such as replicas='2,1'"
        )
    groups = _groups(dict(_layers(model)))
    refuse_unless(bool(groups), "the number of layers with parameters", 0, ">= 1")
    names = [next(iter(group)) for group in groups]
    work, received = _counted(model)
    for name in names:
        if name not in received:
            raise Refused(f"replicas is 'planned', but layer {name} is in the model twice, and a stage needs its own")
    seconds = samples * work.total / REFERENCE_FLOPS
    return ChainCosts(
        names,
        [seconds * sum(_share(work, name).total for name in group) for group in groups],
        [*(samples * received[name] for name in names[1:]), 0.0],
        [float(sum(_parameter_bytes(layer) for layer in group.values())) for group in groups],
    )


def _layers(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    for name, layer in model._modules.items():
        if is_chain(layer):
            yield from _layers(layer, f"{prefix}{name}.")
        elif layer is not None:
            yield prefix + name, layer


def _groups(layers: Layers) -> list[Layers]:
    """Those in front of the first layer with parameters belong to its group."""
    groups: list[Layers] = []
    before: Layers = {}
    for name, layer in layers.items():
        if _parameter_bytes(layer):
            groups.append({**before, name: layer})
            before = {}
        else:
            (groups[-1] if groups else before)[name] = layer
    return groups


def _parameter_bytes(layer: nn.Module) -> int:
    return sum(p.nbytes for p in layer.parameters() if p.requires_grad)


def _share(work: ModelWork, layer: str) -> Work:
    return work.share(name for name in work.modules if name == layer or name.startswith(f"{layer}."))


def _counted(model: nn.Module) -> tuple[ModelWork, dict[str, float]]:
    """The work of a model, and for one sample the bytes that each module receives."""
    source, received = source_of(model), dict[str, float]()

    def note(name: str, _: nn.Module, inputs: Sequence[Any], __: Any) -> None:
        received[name] = sum(x.nbytes for x in tensors_in(inputs)) / SAMPLES

    if source.example is None:
        raise Refused(
            "replicas is 'planned', but inputs of the model are not known, from which its work is counted: give a few "
            "samples, mh.join(example=(x,)), or the numbers, such as replicas='2,1'"
        )
    work = None if source.count is None else source.count(model)
    if work is not None and work.why_estimated:
        raise Refused(f"replicas is 'planned', but the work of the model cannot be counted: {work.why_estimated}")
    inputs = [x[torch.arange(SAMPLES) % len(x)] if isinstance(x, Tensor) and x.dim() else x for x in source.example()]
    found = count_work(model, inputs, note)
    return work or complete(model, found), received
