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
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from torch import nn

from manyhands.core.activation_meter import ActivationMeter
from manyhands.core.errors import Refused, refuse_unless
from manyhands.core.param_cut import ParamCut, ParamCuts
from manyhands.core.port import Transport
from manyhands.core.stage import Keep
from manyhands.core.strategy import Batch
from manyhands.core.subgroup import Subgroup
from manyhands.core.team import Origin
from manyhands.core.worker import Worker
from manyhands.splits import schedules
from manyhands.splits.cut_stage import CutStage
from manyhands.splits.cuts import Cuts, Names, joined, parted
from manyhands.splits.cutting import Balance
from manyhands.splits.owned_parameters import SlicePart
from manyhands.splits.slice_passes import SlicePasses
from manyhands.splits.sliced import Sliced
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
        stages: the number of ranks, or of teams of slices, each with one stage, or with several if the schedule is
            "interleaved"; 0: all workers form one pipeline.
        micro_batches: M, the number that a mini-batch is divided into.
        schedule: the order of the passes.
        chunks: v, the stages of a rank, if the schedule is "interleaved".
        keep: "graph": the graph of a forward pass is kept until its backward pass; "inputs": only its input is, and the
            forward pass is computed again; None: "inputs" for "gpipe", as in its paper, "graph" for the others.
        of: several ranks have slices of each stage (splits/sliced.py): `piped(2, of=sliced(2))` are four ranks.
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
    of: Sliced | None = None
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
        if self.of is not None:
            refuse_unless(self.of.ranks >= 1, "ranks of the slices", self.of.ranks, ">= 1")
        self._cuts = Cuts(self.cut, self.balance, self.example)

    @property
    def size(self) -> int:
        return self.stages * self._slices

    @property
    def _slices(self) -> int:
        """The ranks of a stage."""
        return 1 if self.of is None else self.of.ranks

    def _count(self, size: int) -> int:
        """K, the ranks of a team of this size that have stages of their own, or the teams of slices that have."""
        refuse_unless(size % self._slices == 0, "workers", size, f"divisible by {self._slices}, the ranks of a stage")
        return size // self._slices

    def check(self, size: int, batch_size: int, model: nn.Module) -> None:
        """The model must have a layer for each stage, and the mini-batch must be divisible."""
        K, M = self._count(size), self.micro_batches
        self._own_stages(model, K)
        refuse_unless(batch_size % M == 0, "batch_size", batch_size, f"divisible by micro_batches = {M}")
        rows_of(self, K)
        if self.of is not None and self._slices > 1 and not self.cuts(model, size):
            self.of.check(self._slices, batch_size, model)

    def settle(self, w: Worker, size: int) -> Mapping[str, Any]:
        """Measure where to cut, if stages are to take equal times."""
        K, samples = self._count(size), w.batch_size // self.micro_batches
        self._cuts, facts = settle(self._cuts, w, K * chunks_of(self, K), samples)
        return facts

    def part(self, model: nn.Module, index: int, size: int) -> nn.Module:
        stage, number = divmod(index, self._slices)
        own = self._own_stages(model, self._count(size))[stage]
        return own if self.of is None else self.of.part(own, number, self._slices)

    def _own_stages(self, model: nn.Module, K: int) -> Sequence[nn.Module]:
        """The stages of each rank, or of each team of slices, as one module."""
        found = self._cuts.stages(model, K * chunks_of(self, K))
        if self._slices > 1 and isinstance(found[0], CutStage):
            raise Refused(f"the model is a {type(model).__name__}, but stages of slices need an nn.Sequential")
        return [joined(found[k::K]) for k in range(K)]

    def cuts(self, model: nn.Module, size: int) -> ParamCuts:
        """Those of the slices of each stage."""
        if self.of is None or self._slices == 1:
            return {}
        names, found = {id(p): name for name, p in model.named_parameters()}, dict[str, ParamCut]()
        for k, module in enumerate(self._own_stages(model, self._count(size))):
            inside = dict(module.named_parameters())
            for name, cut in self.of.cuts(module, self._slices).items():
                found[names[id(inside[name])]] = cut.shifted(k * self._slices)
        return found

    def begin(self, w: Worker, members: Transport) -> None:
        """This member's row of the schedule, and the passes of its stages."""
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
        modules = parted(w.trained.whole if isinstance(w.trained, SlicePart) else w.trained)
        rows = rows_of(self, size)
        self._row, depth = rows[index], max(map(schedules.in_flight, rows))
        self._meter, self._keep = ActivationMeter(), keep_of(self)
        self._meter.on = True
        count, splits = size * chunks_of(self, size), self.schedule == "zero-bubble"
        passes_of = partial(StagePasses, depth=depth, stages=count, splits=splits, meter=self._meter)
        numbers = range(index, count, size)
        self._passes = {s: passes_of(w, members, module, index=s) for s, module in zip(numbers, modules, strict=True)}
        users = modules[0].own.tensors if isinstance(modules[0], CutStage) else {}
        self._tied = TiedWeights(w, members, users)

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


def chunks_of(team: Piped, size: int) -> int:
    """The stages of a rank; of a single rank they would follow one another, so it has one."""
    return team.chunks if team.schedule == "interleaved" and size > 1 else 1


def rows_of(team: Piped, size: int) -> schedules.Rows:
    """What so many ranks do for one mini-batch."""
    if team.schedule == "interleaved":
        return schedules.interleaved(size, team.micro_batches, chunks_of(team, size))
    return SCHEDULES[team.schedule](size, team.micro_batches)


def keep_of(team: Piped) -> Keep:
    """What is kept of a micro-batch."""
    return team.keep or ("inputs" if team.schedule == "gpipe" else "graph")


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
