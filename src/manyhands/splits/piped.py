"""Piped: a team of pipeline stages. The micro-batches of a mini-batch pass through them; their gradients are summed.

    part      the layers of one stage (splits/layers.py)
    gradient  F(m) and B(m) for all micro-batches m, in the order of a schedule that flushes: all have passed at its end
    sent      K - 1 activations forward and as many errors backward for each micro-batch

The gradient is that of one process on the whole mini-batch: each micro-batch counts by its share of the samples. Layers
that use statistics of a batch (BatchNorm) see micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import nn

from manyhands.core.errors import Refused, refuse_unless
from manyhands.core.port import Transport
from manyhands.core.strategy import Batch
from manyhands.core.team import Origin
from manyhands.core.worker import Worker
from manyhands.splits import schedules
from manyhands.splits.layers import stages
from manyhands.splits.stage_passes import StagePasses

SCHEDULES: Mapping[str, schedules.Schedule] = {"gpipe": schedules.gpipe, "one-f-one-b": schedules.one_f_one_b}
"""Those that flush."""


@dataclass
class Piped:
    """A replica of the model whose layers are divided into stages, one per rank.

    Args:
        stages: K, the number of ranks; 0: all workers form one pipeline.
        micro_batches: M, the number that a mini-batch is divided into.
        schedule: the order of the passes.
    """

    stages: int = 0
    micro_batches: int = 4
    schedule: Literal["gpipe", "one-f-one-b"] = "gpipe"

    def __post_init__(self) -> None:
        refuse_unless(self.stages >= 0, "stages", self.stages, ">= 1, or 0: as many as there are workers")
        refuse_unless(self.micro_batches >= 1, "micro_batches", self.micro_batches, ">= 1")
        refuse_unless(self.schedule in SCHEDULES, "schedule", self.schedule, f"one of {', '.join(SCHEDULES)}")

    @property
    def size(self) -> int:
        return self.stages

    def check(self, size: int, batch_size: int, model: nn.Module) -> None:
        """The model must have a layer for each stage, and the mini-batch must be divisible."""
        stages(model, size)
        chunks = self.micro_batches
        refuse_unless(batch_size % chunks == 0, "batch_size", batch_size, f"divisible by micro_batches = {chunks}")

    def part(self, model: nn.Module, index: int, size: int) -> nn.Module:
        return stages(model, size)[index]

    def begin(self, w: Worker, members: Transport) -> None:
        """This member's row of the schedule, and its passes."""
        if w.task.loss is None or w.task.sizes_only:
            raise Refused("a pipeline needs a task with a loss function and real data")
        if members.size == self.micro_batches == 1:
            return
        w.team = self
        rows = SCHEDULES[self.schedule](members.size, self.micro_batches)
        self._row = rows[members.rank]
        self._passes = StagePasses(w, members, w.trained, max(map(schedules.in_flight, rows)))

    def gradient(self, w: Worker, batch: Batch, origin: Origin) -> float:
        """Play this stage's row; the loss is the mean over all samples, on every member."""
        samples, passes = len(batch[0]), self._passes
        refuse_unless(samples >= self.micro_batches, "the number of samples", samples, f">= {self.micro_batches}")
        chunks = list(zip(*(field.tensor_split(self.micro_batches) for field in batch), strict=True))
        rank, step, key = origin
        w.flat.open(by_hooks=False)
        for op, m, _ in self._row:
            if op == "F":
                passes.forward(m, chunks[m], passes.stage.live, rank, step, (key, passes.index, m))
            else:
                passes.backward(m, len(chunks[m][0]) / samples)
        w.flat.close()
        losses = [float(passes.losses.pop(m)) * len(chunk[0]) for m, chunk in enumerate(chunks)]
        return sum(losses) / samples


EXAMPLES: Mapping[str, Piped] = {"piped": Piped(stages=2), "piped, 1f1b": Piped(stages=2, schedule="one-f-one-b")}
