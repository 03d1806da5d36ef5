"""Piped: a team of pipeline stages. The micro-batches of a mini-batch pass through them; their gradients are summed.

    part      the layers of one stage: of an nn.Sequential (splits/layers.py), or of any module (splits/cutting.py)
    gradient  F(m) and B(m) for all micro-batches m, in the order of a schedule that flushes: all have passed at its end
    sent      K - 1 activations forward and as many errors backward for each micro-batch; of a module that is no
              nn.Sequential also its skip connections, and the gradients of weights that several stages use

The gradient is that of one process on the whole mini-batch: each micro-batch counts by its share of the samples. Layers
that use statistics of a batch (BatchNorm) see micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from torch import nn

from manyhands.core.errors import Refused, refuse_unless
from manyhands.core.port import Transport
from manyhands.core.strategy import Batch
from manyhands.core.team import Origin
from manyhands.core.work import source_of
from manyhands.core.worker import Worker
from manyhands.splits import schedules
from manyhands.splits.cut_passes import CutPasses
from manyhands.splits.cutting import Balance, CutStage
from manyhands.splits.cutting import cut as cut_stages
from manyhands.splits.layers import stages
from manyhands.splits.stage_passes import StagePasses

SCHEDULES: Mapping[str, schedules.Schedule] = {"gpipe": schedules.gpipe, "one-f-one-b": schedules.one_f_one_b}
"""Those that flush."""
NEEDS = "a pipeline needs a task with a loss function and real data"


@dataclass
class Piped:
    """A replica of the model whose layers are divided into stages, one per rank.

    Args:
        stages: K, the number of ranks; 0: all workers form one pipeline.
        micro_batches: M, the number that a mini-batch is divided into.
        schedule: the order of the passes.
        cut: the names of the modules with which stages 1, 2, ... begin, also as one text ("h.4, h.8"); None: chosen.
        balance: what the largest stage has little of, if the cuts are chosen: "work" (operations) or "parameters".
        example: inputs of the model for a few samples, to cut a model in a loop of one's own; a task has some.
    """

    stages: int = 0
    micro_batches: int = 4
    schedule: Literal["gpipe", "one-f-one-b"] = "gpipe"
    cut: Sequence[str] | str | None = None
    balance: Balance = "work"
    example: Sequence[Any] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        refuse_unless(self.stages >= 0, "stages", self.stages, ">= 1, or 0: as many as there are workers")
        refuse_unless(self.micro_batches >= 1, "micro_batches", self.micro_batches, ">= 1")
        refuse_unless(self.schedule in SCHEDULES, "schedule", self.schedule, f"one of {', '.join(SCHEDULES)}")
        refuse_unless(
            self.balance in get_args(Balance), "balance", self.balance, f"one of {', '.join(get_args(Balance))}"
        )
        if isinstance(self.cut, str):
            self.cut = self.cut.replace(",", " ").split()

    @property
    def size(self) -> int:
        return self.stages

    def check(self, size: int, batch_size: int, model: nn.Module) -> None:
        """The model must have a layer for each stage, and the mini-batch must be divisible."""
        self._stages(model, size)
        chunks = self.micro_batches
        refuse_unless(batch_size % chunks == 0, "batch_size", batch_size, f"divisible by micro_batches = {chunks}")

    def part(self, model: nn.Module, index: int, size: int) -> nn.Module:
        return self._stages(model, size)[index]

    def _stages(self, model: nn.Module, count: int) -> Sequence[nn.Module]:
        """The layers of an nn.Sequential; of other modules, or with chosen cuts, segments of their forward pass."""
        is_chain = isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward
        if is_chain and self.cut is None and self.balance == "work":
            return stages(model, count)
        example = source_of(model).example
        if any(p.is_meta for p in model.parameters()):
            raise Refused(f"the model is a {type(model).__name__} of sizes only, but is cut by running it: {NEEDS}")
        if self.example is None and example is None:
            raise Refused(
                f"the model is a {type(model).__name__}, which is cut by running it: give inputs for a few samples, "
                "piped(example=(x,)), or make it an nn.Sequential"
            )
        inputs = self.example if self.example is not None or example is None else example()
        assert inputs is not None
        return cut_stages(model, inputs, count, self.cut, self.balance)

    def begin(self, w: Worker, members: Transport) -> None:
        """This member's row of the schedule, and its passes."""
        has_loss = w.task.loss is not None or (isinstance(w.trained, CutStage) and w.task.gradient is None)
        if not has_loss or w.task.sizes_only:
            raise Refused(NEEDS)
        if members.size == self.micro_batches == 1:
            return
        w.team = self
        rows = SCHEDULES[self.schedule](members.size, self.micro_batches)
        self._row = rows[members.rank]
        depth = max(map(schedules.in_flight, rows))
        if isinstance(w.trained, CutStage):
            self._passes: StagePasses = CutPasses(w, members, w.trained, depth)
        else:
            self._passes = StagePasses(w, members, w.trained, depth)

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
        if isinstance(passes, CutPasses):
            passes.sum_tied()
        losses = [float(passes.losses.pop(m)) * len(chunk[0]) for m, chunk in enumerate(chunks)]
        return sum(losses) / samples


EXAMPLES: Mapping[str, Piped] = {"piped": Piped(stages=2), "piped, 1f1b": Piped(stages=2, schedule="one-f-one-b")}
