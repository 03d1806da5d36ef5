"""Piped: a team of pipeline stages. The micro-batches of a mini-batch pass through them; their gradients are summed.

    part      the layers of one stage, or of several that lie apart (rank r of P has r, r + P, ...): of an nn.Sequential
              or of any module (splits/cuts.py)
    gradient  F(m) and B(m) for all micro-batches m, in the order of a schedule that flushes: all have passed at its end
    sent      S - 1 activations forward and as many errors backward for each micro-batch, with S stages; of a module
              that is no nn.Sequential also its skip connections, and the gradients of weights that several stages use

The gradient is that of one process on the whole mini-batch: each micro-batch counts by its share of the samples. Layers
that use statistics of a batch (BatchNorm) see micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from torch import nn

from manyhands.core.activation_meter import ActivationMeter
from manyhands.core.errors import refuse_unless
from manyhands.core.port import Transport
from manyhands.core.stage import Keep
from manyhands.core.strategy import Batch
from manyhands.core.team import Origin
from manyhands.core.worker import Worker
from manyhands.splits import schedules
from manyhands.splits.cut_stage import CutStage
from manyhands.splits.cuts import Cuts, Names, joined, parted
from manyhands.splits.cutting import Balance
from manyhands.splits.stage_passes import StagePasses
from manyhands.splits.tied_weights import TiedWeights
from manyhands.splits.timed_cuts import settle

FlushingSchedule = Literal["gpipe", "one-f-one-b", "interleaved", "zero-bubble"]
SCHEDULES: Mapping[FlushingSchedule, schedules.Schedule] = {
    "gpipe": schedules.gpipe,
    "one-f-one-b": schedules.one_f_one_b,
    "interleaved": schedules.interleaved,
    "zero-bubble": schedules.zero_bubble,
}
"""Those that flush."""


@dataclass
class Piped:
    """A replica of the model whose layers are divided into stages.

    Args:
        stages: the number of ranks, each with one stage, or with several if the schedule is "interleaved"; 0: all
            workers form one pipeline.
        micro_batches: M, the number that a mini-batch is divided into.
        schedule: the order of the passes.
        chunks: v, the stages of a rank, if the schedule is "interleaved".
        keep: "graph": the graph of a forward pass is kept until its backward pass; "inputs": only its input is, and the
            forward pass is computed again; None: "inputs" for "gpipe", as in its paper, "graph" for the others.
        cut: the names of the modules with which stages 1, 2, ... begin, also as one text ("h.4, h.8"); None: chosen.
        balance: what the largest stage has little of, if the cuts are chosen: "work" (operations), "time" (seconds,
            measured on the first rank before training; in real processes only) or "parameters".
        example: inputs of the model for a few samples, to cut a model in a loop of one's own; a task has some.
    """

    stages: int = 0
    micro_batches: int = 4
    schedule: FlushingSchedule = "gpipe"
    chunks: int = 2
    keep: Keep | None = None
    cut: Names = None
    balance: Balance = "work"
    example: Sequence[Any] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        refuse_unless(self.stages >= 0, "stages", self.stages, ">= 1, or 0: as many as there are workers")
        refuse_unless(self.micro_batches >= 1, "micro_batches", self.micro_batches, ">= 1")
        refuse_unless(self.schedule in SCHEDULES, "schedule", self.schedule, f"one of {', '.join(SCHEDULES)}")
        refuse_unless(self.chunks >= 1, "chunks", self.chunks, ">= 1")
        is_default = self.schedule == "interleaved" or self.chunks == 2
        refuse_unless(
            is_default, "chunks", self.chunks, "left as it is: only 'interleaved' has several stages per rank"
        )
        refuse_unless(self.keep in (None, "graph", "inputs"), "keep", self.keep, "one of graph, inputs")
        self._cuts = Cuts(self.cut, self.balance, self.example)

    @property
    def size(self) -> int:
        return self.stages

    def check(self, size: int, batch_size: int, model: nn.Module) -> None:
        """The model must have a layer for each stage, and the mini-batch must be divisible."""
        self.part(model, 0, size)
        M = self.micro_batches
        refuse_unless(batch_size % M == 0, "batch_size", batch_size, f"divisible by micro_batches = {M}")
        self._rows(size)

    def _chunks(self, size: int) -> int:
        """The stages of a rank; of a single rank they would follow one another, so it has one."""
        return self.chunks if self.schedule == "interleaved" and size > 1 else 1

    def _rows(self, size: int) -> schedules.Rows:
        if self.schedule == "interleaved":
            return schedules.interleaved(size, self.micro_batches, self._chunks(size))
        return SCHEDULES[self.schedule](size, self.micro_batches)

    def settle(self, w: Worker, size: int) -> Mapping[str, Any]:
        """Measure where to cut, if stages are to take equal times."""
        samples = w.batch_size // self.micro_batches
        self._cuts, facts = settle(self._cuts, w, size * self._chunks(size), samples)
        return facts

    def part(self, model: nn.Module, index: int, size: int) -> nn.Module:
        return joined(self._cuts.stages(model, size * self._chunks(size))[index::size])

    def begin(self, w: Worker, members: Transport) -> None:
        """This member's row of the schedule, and the passes of its stages."""
        modules = parted(w.trained)
        size, index = members.size, members.rank
        if size == self.micro_batches == 1:
            return
        w.team = self
        rows = self._rows(size)
        self._row, depth = rows[index], max(map(schedules.in_flight, rows))
        self._keep: Keep = self.keep or ("inputs" if self.schedule == "gpipe" else "graph")
        self._meter = ActivationMeter()
        self._meter.on = True
        count, splits = size * self._chunks(size), self.schedule == "zero-bubble"
        passes_of = partial(StagePasses, depth=depth, stages=count, splits=splits, meter=self._meter)
        numbers = range(index, count, size)
        self._passes = {s: passes_of(w, members, module, index=s) for s, module in zip(numbers, modules, strict=True)}
        users = modules[0].own.tensors if isinstance(modules[0], CutStage) else {}
        self._tied = TiedWeights(w, members, users)

    def gradient(self, w: Worker, batch: Batch, origin: Origin) -> float:
        """Play this rank's row; the loss is the mean over all samples, on every member."""
        batch, M = w.sized(batch), self.micro_batches
        samples = len(batch[0])
        refuse_unless(samples >= M, "the number of samples", samples, f">= {M}")
        chunks = list(zip(*(field.tensor_split(M) for field in batch), strict=True))
        rank, step, key = origin
        w.flat.open(by_hooks=False)
        for op, m, s in self._row:
            passes = self._passes[s]
            if op == "F":
                passes.forward(m, chunks[m], passes.stage.live, rank, step, (key, s, m), self._keep)
            elif op == "W":
                passes.weigh(m)
            else:
                back = passes.backward if op == "B" else passes.inward
                back(m, len(chunks[m][0]) / samples)
        w.flat.close()
        self._tied.sum()
        self._meter.on, w.activations = False, self._meter.most
        return sum(passes.losses[m] * len(chunk[0]) for m, chunk in enumerate(chunks)) / samples


EXAMPLES: Mapping[str, Piped] = {
    "piped": Piped(stages=2),
    "piped, graphs kept": Piped(stages=2, keep="graph"),
    "piped, 1f1b": Piped(stages=2, schedule="one-f-one-b"),
    "piped, 1f1b, inputs kept": Piped(stages=2, schedule="one-f-one-b", keep="inputs"),
    "piped, interleaved": Piped(stages=2, micro_batches=12, schedule="interleaved"),
    "piped, zero bubble": Piped(stages=2, micro_batches=6, schedule="zero-bubble"),
}
