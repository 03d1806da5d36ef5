"""Streaming: the layers are divided into stages, one per worker; mini-batches stream through them without a flush.

A method is four answers: in which order (splits/schedules), with which weights (splits/versions), what is kept between
the two passes (core/stage.py), and whose error: that of the next stage, or a prediction (strategies/synthetic.py).

    method                schedule            F(m) sees            B(m) sees   kept     U moves
    pipelined-backprop    figure5             now                  now         graph    newest
    small-batch-pipeline  figure5, 2K-1       now                  now         graph    newest
                          pieces of a batch
    pipedream             alternating         now, copied          the copy    graph    newest
      vertical_sync       alternating         chosen at stage 0    the same    graph    newest
      replicas            round_robin         now, copied          the copy    graph    newest, with a round's sum
    spectrain             alternating         W + s_F step         W + s_B     graph    newest
                                                                   step
    pipedream-2bw         alternating, U      version t - 1        the same    graph    newest
                          after M pieces
    ddg                   decoupled           now, copied          the copy    graph    newest
    features-replay       decoupled           now                  now         inputs   newest
    weight-copies         rounds              copy m mod (2K-1)    the same    graph    that copy
    dni                   synthetic           now                  now         graph    newest

    F(m), B(m)   splits/stage_passes.py
    U(m)         w <- w + rule(g), with the gradients of all mini-batches since the last update
    T(m)         the last stage permits stage 0 to begin mini-batch m + 1
    A(m)         copies of the weights are averaged
    L(m)         the model of the errors learns

m counts pieces of mini-batches where these are divided. A pause drains the pipeline: all actions of the mini-batches
taken in are run; then it is filled again. Pipelines that flush after every mini-batch are teams (splits/piped.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from manyhands.core.declared_state import StateParts
from manyhands.core.errors import Refused, refuse_unless
from manyhands.core.gather import gather, need_all
from manyhands.core.lag import StepLag, applied_at
from manyhands.core.port import Tag, recv
from manyhands.core.rule import Rule, UpdateContext
from manyhands.core.stage import Keep
from manyhands.core.strategy import Batch, Strategy, Traits, Weights
from manyhands.core.worker import Worker
from manyhands.splits.cuts import Cuts
from manyhands.splits.schedules import EndlessSchedule, finite, in_flight
from manyhands.splits.stage_passes import StagePasses
from manyhands.splits.tied_weights import shared_names
from manyhands.splits.timed_cuts import settle
from manyhands.splits.versions import Double, StageWeights, Versions, refuse_autocast, refuse_derived

TURN = Tag("pipeline-turn", carries="nothing")


@dataclass
class MicroBatch:
    """A mini-batch in flight, or a piece of one: its fields until F(m), and its part in an update."""

    fields: Batch
    samples_before: int
    share: float
    rate: float


@dataclass
class Streaming(Strategy):
    """Training with the layers divided into stages, without a flush.

    Args:
        rule: how a stage applies its gradient.
        schedule: makes the endless rows of actions for K stages.
        versions: which weights the passes see, and which an update moves.
        keeps: what is kept of a forward pass: its graph, or only its input.
        micro_batches: into how many pieces a mini-batch is divided, which make one update.
        fills: whether a mini-batch is divided into 2K - 1 pieces of at least two samples, with an update each.
        cuts: where the model is cut.
    """

    rule: Rule
    schedule: EndlessSchedule
    versions: Callable[[StageWeights], Versions]
    keeps: Keep = "graph"
    micro_batches: int = 1
    fills: bool = False
    cuts: Cuts = field(default_factory=Cuts)

    def __post_init__(self) -> None:
        refuse_unless(self.micro_batches >= 1, "micro_batches", self.micro_batches, ">= 1")

    @property
    def kind(self) -> str:
        """A run is resumed with the same versions: their state differs."""
        return f"{type(self).__name__} {getattr(self.versions, '__name__', 'of versions')}"

    @property
    def traits(self) -> Traits:
        divided = "a worker has only a stage of the model, and no whole loss or gradient"
        return Traits(
            lockstep=True,
            on_worker_loss="ends",
            streams=True,
            lag="counted",
            lag_counts="updates of the same weights of a stage between the forward pass of a mini-batch and its own "
            "update",
            needs_step=divided,
            needs_whole_model="its workers divide the model themselves",
        )

    def replicas(self, workers: int) -> int:
        """All workers together hold one model."""
        return 1

    def check(self, workers: int, servers: int, batch_size: int, model: nn.Module) -> None:
        """The model must have a layer for each stage, a mini-batch a sample for each piece; no derived weights."""
        found = self.cuts.stages(model, workers)
        _refuse_ties(model, found)
        if self.versions is Double:
            reason = f">= {workers - 1}, or more than two versions would be in use: one less than the stages"
            refuse_unless(self.micro_batches >= workers - 1, "micro_batches", self.micro_batches, reason)
        pieces = self.micro_batches
        refuse_unless(batch_size >= pieces, "batch_size", batch_size, f">= {pieces}, the number of micro-batches")
        if self._rewrites and workers > 1:
            refuse_derived(model)

    @property
    def _rewrites(self) -> bool:
        """Whether B(m) combines the activations of F(m) with other weights."""
        return self.keeps == "graph" and getattr(self.versions, "rewrites", False)

    def setup(self, w: Worker) -> None:
        """This rank's stage and its passes; its row of the schedule; the mini-batches that are in flight."""
        self.index, count = self._stage_of(w)
        self.cuts, self.facts = settle(self.cuts, w, count, w.batch_size // self.micro_batches)
        module = self.cuts.stages(w.model, count)[self.index]
        w.lay_out(module)
        depth = max(in_flight(row) for row in finite(self.schedule(len(w.workers)), 2 * len(w.workers)))
        self.passes = self._make_passes(w, module, depth + 1)
        stage = StageWeights(w.flat, self.passes.stage.live, self.rule, w.ops, self.index, count, self.micro_batches)
        self.weights = self.versions(replace(stage, begun=w.step))
        self.in_flight: dict[int, MicroBatch] = {}
        self.next_update: list[int] = []
        self.loss: float | None = None
        self.acts: dict[str, Callable[[Worker, int], None]] = {
            "F": self._forward,
            "B": self._backward,
            "U": self._update,
            "T": self._turn,
            "A": self._average,
        }
        self._fill(w)
        w.flat.open(by_hooks=False)

    def _stage_of(self, w: Worker) -> tuple[int, int]:
        """The stage of this rank, and how many there are."""
        return w.workers.index(w.rank), len(w.workers)

    def _make_passes(self, w: Worker, module: nn.Module, depth: int) -> StagePasses:
        return StagePasses(w, w.transport, module, depth)

    def _fill(self, w: Worker) -> None:
        """Begin the stage's row of the schedule with the next mini-batch."""
        self.taken = w.step * self._pieces(w, w.batch_size)
        self.first, row = self.taken, self.schedule(len(w.workers))[w.workers.index(w.rank)]
        self.row = (action._replace(m=self.first + action.m) for action in row)
        self.action = next(self.row)

    def step(self, w: Worker, batch: Batch) -> float | None:
        """Take in one mini-batch; run the actions of the schedule up to the forward pass of the next one."""
        self._take_in(w, batch)
        self._run(w, "F")
        return self.loss

    def _take_in(self, w: Worker, batch: Batch) -> None:
        """Divide a mini-batch into pieces."""
        batch, before = w.sized(batch), w.step * w.batch_size
        samples = len(batch[0])
        count = self._pieces(w, samples)
        refuse_unless(samples >= count, "the number of samples", samples, f">= {count}, the number of micro-batches")
        for fields in zip(*(x.tensor_split(count) for x in batch), strict=True):
            part = len(fields[0]) / samples
            share, rate = (1.0, part) if self.fills else (part, 1.0)
            self.in_flight[self.taken] = MicroBatch(fields, before, share, rate)
            self.taken += 1
            before += len(fields[0]) if self.fills else 0

    def _pieces(self, w: Worker, samples: int) -> int:
        """Into how many pieces a mini-batch is divided: of two samples at least, as BatchNorm needs."""
        return max(1, min(2 * len(w.workers) - 1, samples // 2)) if self.fills else self.micro_batches

    def _run(self, w: Worker, until: str) -> None:
        """Run the actions of what was taken in, up to the first pass of this kind of what was not."""
        while not self._must_wait(until):
            if self.action.m < self.taken:
                self.acts[self.action.op](w, self.action.m)
            self.action = next(self.row)

    def _must_wait(self, until: str) -> bool:
        """Whether the next action is for a later step; of a drain, whether it is over."""
        return self.action.op == until and self.action.m >= self.taken

    # -- actions ----------------------------------------------------------------------------------

    def _forward(self, w: Worker, m: int) -> None:
        if self._rewrites:
            refuse_autocast()
        came = self.passes.receive(m)
        weights, version = self.weights.forward(m, came[0] if came else None)
        fields, self.in_flight[m].fields = self.in_flight[m].fields, ()
        travels = () if version is None else (version,)
        self.passes.forward(m, fields, weights, w.rank, m, 0, self.keeps, travels)

    def _backward(self, w: Worker, m: int) -> None:
        self.weights.backward(m)
        self.passes.backward(m, self.in_flight[m].share)
        self.next_update.append(m)

    def _update(self, w: Worker, m: int) -> None:
        """Apply the gradients since the last update; a rate schedule sees the samples before them, on every stage."""
        w.flat.close()
        own, self.next_update = self.next_update, []
        pieces = {one: self.in_flight.pop(one) for one in self._joined(w, m, own)}
        first = pieces[min(pieces)]
        if own:
            lag = max(self.weights.done(one) for one in own)
            w.lag = StepLag(w.lag.outcomes.plus(applied_at(lag)))
        for group, weight_slice in zip(w.flat.groups, self.weights.moves(m), strict=True):
            at = UpdateContext(weight_slice.weights, samples=first.samples_before, rate=first.rate)
            weight_slice.update(group.grad, at, group.untouched())
        self.weights.updated(m)
        w.flat.open(by_hooks=False)
        if own:
            self.loss = sum(self.passes.losses.pop(one) * pieces[one].share for one in own)

    def _joined(self, w: Worker, m: int, own: list[int]) -> list[int]:
        """The mini-batches whose gradients are in an update: those that this rank has added up."""
        return own

    def _turn(self, w: Worker, m: int) -> None:
        """The last stage permits the next forward pass; the first one waits for that."""
        if self.index:
            w.transport.send(w.workers[0], TURN.of(m))
        else:
            recv(w.transport, TURN.of(m), frm=w.workers[-1]).release()

    def _average(self, w: Worker, m: int) -> None:
        self.weights.settle()

    # -- the end, checkpoints ---------------------------------------------------------------------

    def notes(self) -> Mapping[str, Any]:
        """How many versions of its weights the stage keeps; once, where the model is cut, if that was measured."""
        facts, self.facts = self.facts, {}
        return {"versions": self.weights.kept, **facts}

    def finish(self, w: Worker) -> None:
        """Drain."""
        self.quiesce(w)

    def answer(self, w: Worker) -> Weights | None:
        """The weights of all stages, gathered by name."""
        names = tuple(slot.name for slot in w.flat.slots)
        gathered = gather(w, names, [w.flat.weights(slot.span) for slot in w.flat.slots])
        if gathered is None:
            return None
        need_all(w, gathered)
        whole: dict[str, Tensor] = dict(w.model.named_parameters())
        for stage_names, tensors in gathered.values():
            for name, x in zip(stage_names, tensors, strict=True):
                whole[name] = x.view(whole[name].shape)
        return {name: x.detach().clone() for name, x in whole.items()}

    def quiesce(self, w: Worker) -> None:
        """Drain: run what is left of the mini-batches taken in."""
        self._run(w, "U")
        self.weights.settle()

    def resume(self, w: Worker) -> None:
        """Fill the pipeline again."""
        self._fill(w)

    def declared_state(self, w: Worker) -> StateParts:
        """The state of the rule and of the versions, divided over the stages; a resumed run may have other stages."""
        return self.weights.state()


def _refuse_ties(model: nn.Module, parts: Sequence[nn.Module]) -> None:
    """Every stage would update its own copy, at another time."""
    names = shared_names(model, parts)
    if names:
        raise Refused(
            f"{' and '.join(names)} are one parameter of several stages, which a pipeline that streams would change "
            "differently: cut where one stage has both, or use gpipe"
        )
