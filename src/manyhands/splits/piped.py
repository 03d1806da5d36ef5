"""Piped: a team of pipeline stages. The micro-batches of a mini-batch pass through them; their gradients are summed.

    part      the layers of one stage, or of several that lie apart (rank r of P has r, r + P, ...): of an nn.Sequential
              (splits/layers.py), or of any module (splits/cutting.py)
    gradient  F(m) and B(m) for all micro-batches m, in the order of a schedule that flushes: all have passed at its end
    sent      S - 1 activations forward and as many errors backward for each micro-batch, with S stages; of a module
              that is no nn.Sequential also its skip connections, and the gradients of weights that several stages use

The gradient is that of one process on the whole mini-batch: each micro-batch counts by its share of the samples. Layers
that use statistics of a batch (BatchNorm) see micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, get_args

from torch import nn

from manyhands.core.activation_meter import ActivationMeter
from manyhands.core.errors import Refused, refuse_unless
from manyhands.core.param_cut import ParamCut, ParamCuts
from manyhands.core.port import Transport
from manyhands.core.stage import Keep
from manyhands.core.strategy import Batch
from manyhands.core.subgroup import Subgroup
from manyhands.core.team import Origin
from manyhands.core.work import source_of
from manyhands.core.worker import Worker
from manyhands.splits import schedules
from manyhands.splits.cut_passes import CutPasses
from manyhands.splits.cutting import Balance, CutStage
from manyhands.splits.cutting import cut as cut_stages
from manyhands.splits.layers import stages
from manyhands.splits.owned_parameters import SlicePart
from manyhands.splits.slice_passes import SlicePasses
from manyhands.splits.sliced import Sliced
from manyhands.splits.stage_passes import StagePasses

FlushingSchedule = Literal["gpipe", "one-f-one-b", "interleaved", "zero-bubble"]
SCHEDULES: Mapping[FlushingSchedule, schedules.Schedule] = {
    "gpipe": schedules.gpipe,
    "one-f-one-b": schedules.one_f_one_b,
    "interleaved": schedules.interleaved,
    "zero-bubble": schedules.zero_bubble,
}
"""Those that flush."""
NEEDS = "a pipeline needs a task with a loss function and real data"


@dataclass
class Piped:
    """A replica of the model whose layers are divided into stages.

    Args:
        stages: the number of ranks, or of teams of slices, each with one stage, or with several if the schedule is
            "interleaved"; 0: all workers form one pipeline.
        micro_batches: M, the number that a mini-batch is divided into.
        schedule: the order of the passes.
        chunks: v, the stages of a rank, if the schedule is "interleaved".
        keep: "graph": the graph of a forward pass is kept until its backward pass; "inputs": only its input is, and the
            forward pass is computed again; None: "inputs" for "gpipe", as in its paper, "graph" for the others.
        of: several ranks have slices of each stage (splits/sliced.py): `piped(2, of=sliced(2))` are four ranks.
        cut: the names of the modules with which stages 1, 2, ... begin, also as one text ("h.4, h.8"); None: chosen.
        balance: what the largest stage has little of, if the cuts are chosen: "work" (operations) or "parameters".
        example: inputs of the model for a few samples, to cut a model in a loop of one's own; a task has some.
    """

    stages: int = 0
    micro_batches: int = 4
    schedule: FlushingSchedule = "gpipe"
    chunks: int = 2
    keep: Keep | None = None
    of: Sliced | None = None
    cut: Sequence[str] | str | None = None
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
        refuse_unless(
            self.balance in get_args(Balance), "balance", self.balance, f"one of {', '.join(get_args(Balance))}"
        )
        if self.of is not None:
            refuse_unless(self.of.ranks >= 1, "ranks of the slices", self.of.ranks, ">= 1")
        if isinstance(self.cut, str):
            self.cut = self.cut.replace(",", " ").split()

    @property
    def size(self) -> int:
        return self.stages * self._slices

    @property
    def _slices(self) -> int:
        """The ranks of a stage."""
        return 1 if self.of is None else self.of.ranks

    def _count(self, size: int) -> int:
        """The stages of a team of this size, or with several on a rank how many ranks they are on."""
        refuse_unless(size % self._slices == 0, "workers", size, f"divisible by {self._slices}, the ranks of a stage")
        return size // self._slices

    def check(self, size: int, batch_size: int, model: nn.Module) -> None:
        """The model must have a layer for each stage, and the mini-batch must be divisible."""
        K, M = self._count(size), self.micro_batches
        self._stages(model, K * self._chunks(K))
        refuse_unless(batch_size % M == 0, "batch_size", batch_size, f"divisible by micro_batches = {M}")
        self._rows(K)
        if self.of is not None and self._slices > 1 and not self.cuts(model, size):
            self.of.check(self._slices, batch_size, model)

    def _chunks(self, size: int) -> int:
        """The stages of a rank; of a single rank they would follow one another, so it has one."""
        return self.chunks if self.schedule == "interleaved" and size > 1 else 1

    def _rows(self, size: int) -> schedules.Rows:
        if self.schedule == "interleaved":
            return schedules.interleaved(size, self.micro_batches, self._chunks(size))
        return SCHEDULES[self.schedule](size, self.micro_batches)

    def part(self, model: nn.Module, index: int, size: int) -> nn.Module:
        stage, slice_index = divmod(index, self._slices)
        own = self._modules(model, size)[stage]
        return own if self.of is None else self.of.part(own, slice_index, self._slices)

    def _modules(self, model: nn.Module, size: int) -> Sequence[nn.Module]:
        """The stage, or the stages, of each rank, or of each team of slices."""
        K = self._count(size)
        own = self._stages(model, K * self._chunks(K))
        if self._slices > 1 and isinstance(own[0], CutStage):
            raise Refused(f"the model is a {type(model).__name__}, but stages of slices need an nn.Sequential")
        return [own[k] if len(own) == K else nn.ModuleList(own[k::K]) for k in range(K)]

    def cuts(self, model: nn.Module, size: int) -> ParamCuts:
        """Those of the slices of each stage."""
        if self.of is None or self._slices == 1:
            return {}
        names, found = {id(p): name for name, p in model.named_parameters()}, dict[str, ParamCut]()
        for k, module in enumerate(self._modules(model, size)):
            inside = dict(module.named_parameters())
            for name, cut in self.of.cuts(module, self._slices).items():
                found[names[id(inside[name])]] = cut.shifted(k * self._slices)
        return found

    def _stages(self, model: nn.Module, count: int) -> Sequence[nn.Module]:
        """The layers of an nn.Sequential; of other modules, or with chosen cuts, segments of their forward pass."""
        is_chain = isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward
        if is_chain and self.cut is None and self.balance == "work":
            return stages(model, count)
        kind = type(model).__name__
        if any(p.is_meta for p in model.parameters()):
            raise Refused(f"the model is a {kind} of sizes only, but is cut by running it: {NEEDS}")
        fits = self.schedule in ("gpipe", "one-f-one-b")
        refuse_unless(fits, "schedule", self.schedule, f"gpipe or one-f-one-b: a {kind} is cut by running it")
        refuse_unless(self.keep != "inputs", "keep", self.keep, f"graph: a {kind} is cut by running it")
        example = source_of(model).example
        if self.example is None and example is None:
            raise Refused(
                f"the model is a {kind}, which is cut by running it: give inputs for a few samples, "
                "piped(example=(x,)), or make it an nn.Sequential"
            )
        inputs = self.example if self.example is not None or example is None else example()
        assert inputs is not None
        return cut_stages(model, inputs, count, self.cut, self.balance)

    def begin(self, w: Worker, members: Transport) -> None:
        """This member's row of the schedule, and the passes of its stages."""
        has_loss = w.task.loss is not None or (isinstance(w.trained, CutStage) and w.task.gradient is None)
        if not has_loss or w.task.sizes_only:
            raise Refused(NEEDS)
        if self._count(members.size) == self.micro_batches == 1:
            if self.of is not None:
                self.of.begin(w, members)
            return
        w.team, self._slice_passes = self, None
        if isinstance(w.trained, SlicePart):
            first = members.rank - members.rank % self._slices
            mates = Subgroup(members, range(first, first + self._slices), f"slices{first}")
            members = Subgroup(members, range(members.rank - first, members.size, self._slices), "stages")
            self._slice_passes = SlicePasses(w, mates, w.trained)
        with nullcontext() if self._slice_passes is None else self._slice_passes.layers:
            self._begin_stages(w, members)

    def _begin_stages(self, w: Worker, members: Transport) -> None:
        """Connect this stage, or this slice of it, with those before and after it."""
        size, index = members.size, members.rank
        rows = self._rows(size)
        self._row, depth = rows[index], max(map(schedules.in_flight, rows))
        self._meter = ActivationMeter()
        if isinstance(w.trained, CutStage):
            self._keep: Keep = "graph"
            self._passes: Mapping[int, StagePasses] = {index: CutPasses(w, members, w.trained, depth)}
            return
        self._keep = self.keep or ("inputs" if self.schedule == "gpipe" else "graph")
        self._meter.on = True
        count, splits = size * self._chunks(size), self.schedule == "zero-bubble"
        passes_of = partial(StagePasses, depth=depth, stages=count, splits=splits, meter=self._meter)
        own = w.trained.whole if isinstance(w.trained, SlicePart) else w.trained
        modules = own if isinstance(own, nn.ModuleList) else [own]
        numbers = range(index, count, size)
        self._passes = {s: passes_of(w, members, module, index=s) for s, module in zip(numbers, modules, strict=True)}

    def gradient(self, w: Worker, batch: Batch, origin: Origin) -> float:
        """Play this rank's row; the loss is the mean over all samples, on every member."""
        if self._slice_passes is None:
            return self._play(w, batch, origin)
        self._slice_passes.share()
        with self._slice_passes.layers:
            loss = self._play(w, batch, origin)
        self._slice_passes.finish(loss)
        return loss

    def _play(self, w: Worker, batch: Batch, origin: Origin) -> float:
        samples, M = len(batch[0]), self.micro_batches
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
        if isinstance(passes, CutPasses):
            passes.sum_tied()
        else:
            self._meter.on, w.activations = False, self._meter.most
        losses = [float(passes.losses[m]) for m in range(M)]
        return sum(loss * len(chunk[0]) for loss, chunk in zip(losses, chunks, strict=True)) / samples


EXAMPLES: Mapping[str, Piped] = {
    "piped": Piped(stages=2),
    "piped, graphs kept": Piped(stages=2, keep="graph"),
    "piped, 1f1b": Piped(stages=2, schedule="one-f-one-b"),
    "piped, 1f1b, inputs kept": Piped(stages=2, schedule="one-f-one-b", keep="inputs"),
    "piped, interleaved": Piped(stages=2, micro_batches=12, schedule="interleaved"),
    "piped, zero bubble": Piped(stages=2, micro_batches=6, schedule="zero-bubble"),
    "piped, of slices": Piped(stages=2, micro_batches=2, of=Sliced(2)),
    "piped, 1f1b of slices": Piped(stages=2, micro_batches=3, schedule="one-f-one-b", of=Sliced(2, "neurons")),
    "piped, zero bubble of slices": Piped(stages=2, micro_batches=2, schedule="zero-bubble", of=Sliced(2)),
}
