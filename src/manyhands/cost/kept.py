"""What the stages of a pipeline keep of a micro-batch between its passes, measured on two and on four samples.

    inputs     what a stage has received
    graph      that, what autograd saves, and what the stage sends
    between    of a split backward pass, between I and W: the inputs and the errors of the layers with weights

All of them are linear in the number of samples: dropout masks and activations grow with it, statistics do not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from manyhands.core.activation_meter import ActivationMeter
from manyhands.core.stage import Keep
from manyhands.core.task import Task
from manyhands.core.weight_products import layers_apart
from manyhands.core.work_counter import example
from manyhands.splits.cut_stage import CutStage
from manyhands.splits.schedules.timeline import Action

FEW, MORE = 2, 4
"""Samples of the two measurements: BatchNorm refuses one."""


class PassBytes(NamedTuple):
    """Bytes of a micro-batch on one stage."""

    inputs: float
    graph: float
    between: float


class StageBytes(NamedTuple):
    """The same for any number of samples."""

    few: PassBytes
    more: PassBytes

    def of(self, samples: int) -> PassBytes:
        pairs = zip(self.few, self.more, strict=True)
        return PassBytes(*(a + (b - a) * (samples - FEW) / (MORE - FEW) for a, b in pairs))


def most_kept(row: Sequence[Action], kept: Sequence[StageBytes], sizes: Sequence[int], keep: Keep) -> int:
    """The most bytes that the rank with this row keeps at one time, with micro-batches of these sizes in turn."""
    now: dict[tuple[int, int], float] = {}
    most = 0.0
    for op, m, s in row:
        one = kept[s].of(sizes[m % len(sizes)])
        if op == "F":
            now[m, s] = one.graph if keep == "graph" else one.inputs
        elif op in "BI":
            now[m, s] = one.graph
        most = max(most, sum(now.values()))
        if op == "I":
            now[m, s] = one.between
            most = max(most, sum(now.values()))
        elif op in "BW":
            del now[m, s]
    return round(most)


def kept_by_stages(task: Task, stages: Sequence[nn.Module], *, splits: bool) -> list[StageBytes]:
    """What each stage keeps of a micro-batch, by its samples."""
    with torch.random.fork_rng(devices=[]):
        few, more = (_measured(task, stages, samples, splits) for samples in (FEW, MORE))
    return [StageBytes(*pair) for pair in zip(few, more, strict=True)]


def _measured(task: Task, stages: Sequence[nn.Module], samples: int, splits: bool) -> list[PassBytes]:
    fields = example(task.data, "meta" if task.sizes_only else None, samples)
    found = []
    received: list[Tensor | None] = []
    for number, stage in enumerate(stages):
        kept, received = _pass(task, stage, fields, received, number == len(stages) - 1, splits)
        found.append(kept)
    return found


def _pass(
    task: Task, stage: nn.Module, fields: Sequence[Any], received: list[Tensor | None], is_last: bool, splits: bool
) -> tuple[PassBytes, list[Tensor | None]]:
    """One forward pass of a stage: what it keeps, and what the next stage receives."""
    meter = ActivationMeter()
    meter.on = True
    with torch.enable_grad(), _noting(stage) as calls, meter.saving("pass", stage.parameters()):
        inputs = fields if task.loss is None else fields[:-1]
        out = stage(inputs, received) if isinstance(stage, CutStage) else stage(*(received or inputs))
        if is_last and task.loss is not None:
            out = task.loss(out, fields[-1])
    sent = list(out) if isinstance(out, tuple) else [out]
    given = _tensors(received or inputs)
    meter.keep("pass", *given, *_tensors(sent))
    between = _between(calls, given, sent) if splits else 0
    kept = PassBytes(sum(x.nbytes for x in given), meter.now, between)
    return kept, [x if x is None else x.detach().requires_grad_(x.requires_grad) for x in sent]


def _between(calls: Mapping[nn.Module, tuple[Tensor, Tensor]], received: Sequence[Any], sent: Sequence[Any]) -> int:
    """Bytes of the inputs and errors of these calls, of what was received, and of the error of what was sent."""
    meter = ActivationMeter()
    meter.on = True
    meter.keep("inputs", *_tensors(received), *(x for x, _ in calls.values()))
    meter.keep("errors", *(y for _, y in calls.values()), *_tensors(sent))
    return meter.now


@contextmanager
def _noting(stage: nn.Module) -> Iterator[dict[nn.Module, tuple[Tensor, Tensor]]]:
    """Within it, the inputs and outputs of the layers whose gradients can be computed apart."""
    calls: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def note(layer: nn.Module, inputs: tuple[Any, ...], out: Tensor) -> None:
        calls[layer] = inputs[0].detach(), out.detach()

    hooks = [layer.register_forward_hook(note) for layer in layers_apart(stage, splits=True)]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def _tensors(xs: Sequence[Any]) -> list[Tensor]:
    return [x for x in xs if isinstance(x, Tensor)]
