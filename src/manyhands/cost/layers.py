"""The layers of a model with what each of them costs: parameters, work, storage, and how much of it can be parallel.

Multiply-adds are counted (core/work_counter.py), for one sample. Storage, depth and W / D are those of a mini-batch;
the last two follow the formulas of cost/compute.py, for the layers that these cover. What is not known is None.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from manyhands.core.task import Task
from manyhands.core.work import ModelWork, Work, owner, work_of
from manyhands.core.work_counter import SAMPLES, count_work
from manyhands.cost.compute import (
    WorkDepth,
    activation,
    batch_norm,
    convolution,
    fully_connected,
    layer_storage,
    pooling,
)

CONVOLUTION = "convolution"
KINDS: Mapping[str, tuple[type[nn.Module], ...]] = {
    CONVOLUTION: (nn.Conv1d, nn.Conv2d, nn.Conv3d),
    "fully connected": (nn.Linear,),
    "pooling": (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
    "activation": (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.ELU, nn.LeakyReLU),
    "batch norm": (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
    "embedding": (nn.Embedding, nn.EmbeddingBag),
}


class LayerCall(NamedTuple):
    """Bytes that a layer took and returned when `SAMPLES` samples passed through the model, and the shape returned."""

    input_bytes: int
    output_bytes: int
    output: torch.Size


@dataclass(frozen=True)
class LayerCost:
    """One layer.

    Args:
        name: its name in the model; empty for the model itself.
        kind: one of `KINDS`, or the name of its class.
        output: the shape of its output for one sample; None: not known.
        parameters: how many it has, without those of layers inside it.
        multiply_adds: those of its forward pass for one sample; None: not known.
        work: operations of its passes in training for one sample.
        storage: bytes in a training step on a mini-batch: weights and outputs, and the gradients of weights and inputs.
        depth: D of its forward pass on a mini-batch.
        parallelism: W / D.
        weight_bytes: of its parameters.
        input_bytes: of what it takes for one sample; None: not known.
        output_bytes: of what it returns for one sample; None: not known.
    """

    name: str
    kind: str
    output: tuple[int, ...] | None
    parameters: int
    multiply_adds: float | None
    work: Work
    storage: int | None
    depth: int | None
    parallelism: float | None
    weight_bytes: int
    input_bytes: int | None
    output_bytes: int | None


@dataclass(frozen=True)
class ModelCost:
    """All layers of a model.

    Args:
        layers: in the order of the model.
        batch_size: samples of a mini-batch.
        work: operations of training for one sample.
        is_chain: whether each layer takes what the one before it returns, as in an `nn.Sequential`.
    """

    layers: tuple[LayerCost, ...]
    batch_size: int
    work: ModelWork
    is_chain: bool = False

    @property
    def parameters(self) -> int:
        return sum(layer.parameters for layer in self.layers)

    @property
    def multiply_adds(self) -> float | None:
        """Of the forward pass for one sample; None if the work was not counted."""
        return None if self.work.why_estimated else sum(layer.multiply_adds or 0.0 for layer in self.layers)

    @property
    def storage(self) -> int | None:
        """Bytes of all layers; None if one is not known."""
        known = [layer.storage for layer in self.layers if layer.storage is not None]
        return sum(known) if len(known) == len(self.layers) else None

    @property
    def kinds(self) -> dict[str, tuple[float, float]]:
        """By kind of layer the shares of the parameters and of the work, the most work first."""
        shares: dict[str, tuple[float, float]] = {}
        for layer in self.layers:
            parameters, work = shares.get(layer.kind, (0.0, 0.0))
            share = layer.work.total / self.work.total
            shares[layer.kind] = parameters + layer.parameters / self.parameters, work + share
        return dict(sorted(shares.items(), key=lambda item: -item[1][1]))


def model_cost(task: Task, batch_size: int | None = None) -> ModelCost:
    """The cost of each layer of a task's model, for mini-batches of the task's size or another one."""
    model = task.build(0)
    work = work_of(model)
    calls: dict[str, LayerCall] = {}
    counted: Mapping[str, Work] | None = None
    if not work.why_estimated:
        counted = count_work(model, task.example_inputs(), lambda *call: _note(calls, *call))
    sizes: dict[str, list[nn.Parameter]] = {}
    for name, p in model.named_parameters():
        sizes.setdefault(owner(name), []).append(p)
    samples = batch_size or task.batch_size
    layers = [
        _layer(name, module, sizes.get(name, []), calls.get(name), counted, work, samples)
        for name, module in model.named_modules()
        if name in sizes or name in work.modules or not any(module.children())
    ]
    return ModelCost(tuple(layers), samples, work, _is_chain(model))


def _is_chain(module: nn.Module) -> bool:
    """Whether its layers are those of `nn.Sequential`s."""
    plain = isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward
    return plain and all(_is_chain(one) or not any(one.children()) for one in module.children())


def _note(calls: dict[str, LayerCall], name: str, module: nn.Module, inputs: Any, outputs: Any) -> None:
    """Add one call of a layer; the bytes of several calls are added."""
    first = outputs[0] if isinstance(outputs, tuple) else outputs
    if isinstance(first, Tensor):
        taken = sum(x.nbytes for x in inputs if isinstance(x, Tensor))
        before = calls.get(name, LayerCall(0, 0, first.shape))
        calls[name] = LayerCall(before.input_bytes + taken, before.output_bytes + first.nbytes, first.shape)


def _layer(
    name: str,
    module: nn.Module,
    parameters: list[nn.Parameter],
    call: LayerCall | None,
    counted: Mapping[str, Work] | None,
    work: ModelWork,
    samples: int,
) -> LayerCost:
    storage = bound = None
    weights = sum(p.nbytes for p in parameters)
    if call is not None:
        batch = [nbytes * samples // SAMPLES for nbytes in call[:2]]
        storage = layer_storage(weights, *batch)
        bound = work_depth(module, (samples, *call.output[1:]))
    return LayerCost(
        name,
        kind_of(module),
        None if call is None else tuple(call.output[1:]),
        sum(p.numel() for p in parameters),
        None if counted is None else counted.get(name, Work()).forward / 2,
        work.of(name),
        storage,
        None if bound is None else bound.depth,
        None if bound is None else bound.parallelism,
        weights,
        None if call is None else call.input_bytes // SAMPLES,
        None if call is None else call.output_bytes // SAMPLES,
    )


def kind_of(module: nn.Module) -> str:
    """One of `KINDS`, or the name of the class."""
    return next((kind for kind, types in KINDS.items() if isinstance(module, types)), type(module).__name__)


def work_depth(module: nn.Module, output: tuple[int, ...]) -> WorkDepth | None:
    """W and D of the forward pass of a layer that returns this shape; None if no formula covers it."""
    layer: Any = module
    numbers = torch.Size(output).numel()
    match kind_of(module):
        case "fully connected":
            return fully_connected(numbers // layer.out_features, layer.in_features, layer.out_features).forward
        case "convolution":
            return convolution(layer.in_channels, output, layer.kernel_size, layer.groups)
        case "pooling":
            sides = len(output) - 2
            kernel = layer.kernel_size
            return pooling(output, kernel if isinstance(kernel, tuple) else (kernel,) * sides)
        case "activation":
            return activation(numbers)
        case "batch norm":
            return batch_norm(output[0], numbers)
    return None
