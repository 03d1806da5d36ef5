"""LocalSteps: every worker trains alone for a round, then all workers average their weights.

split  data        when  in rounds, in lock step        who  a collective
what   any Codec   how   any Rule within a round; between rounds the average, or an outer Rule that steps towards it

    x_k <- x_k + rule(g_k(x_k))                    in every step of a round
    x   =  sum_k a_k x_k                           a_k = 1/P, or proportional to an AveragingWeight
    x_k <- x                                       or, with an outer rule:
    W   <- W + outer(W - x);  x_k <- W             W: the weights at the start of a round

With a codec and an outer rule W - x_k is sent encoded (collectives/compressed): the error of one round is kept in
memory and sent with the next.

In the first `warmup` steps gradients are averaged instead, as in `allreduce`. An incomplete round at the end of the run
is a shorter one. The answer is the average, or the outcome of the outer rule at W.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from manyhands.collectives import collective
from manyhands.collectives.compressed import Gather
from manyhands.collectives.weighted_average import AveragingWeight, FixedWeights, average
from manyhands.consistency import Rounds
from manyhands.core.codec import Codec
from manyhands.core.declared_state import CustomState, RuleState, StatePart, StateParts, VectorState
from manyhands.core.errors import Refused, refuse_unless
from manyhands.core.flat import Span
from manyhands.core.gather import gather, mean
from manyhands.core.rule import LooksAhead, Rule, UpdateContext
from manyhands.core.state import load_vectors, named
from manyhands.core.strategy import Batch, Saved, Strategy, Traits, Weights
from manyhands.core.weight_slice import WeightSlice, replica_slices
from manyhands.core.worker import Worker


@dataclass
class LocalSteps(Strategy):
    """Rounds of local training.

    Args:
        rule: how a worker applies its own gradient.
        rounds: how long a round is.
        outer: how the average of a round is applied; None: it replaces the weights.
        warmup: steps before the first round.
        memory: whether the state of the local rule is kept, averaged or reset after a round.
        weight: the weight of each worker in the average; None: all equal.
        draws_from_all: whether every worker may draw any sample, instead of having its own shard of the data.
        codec: encodes the change of a round; None: it is sent uncompressed.
    """

    rule: Rule
    rounds: Rounds = field(default_factory=Rounds)
    outer: Rule | None = None
    warmup: int = 0
    memory: Literal["keep", "average", "reset"] = "keep"
    weight: AveragingWeight | None = None
    draws_from_all: bool = False
    codec: Codec | None = None

    @property
    def traits(self) -> Traits:
        meets = self.rounds.period is not None
        return Traits(
            lockstep=True,
            on_worker_loss="ends",
            draws_from_all=self.draws_from_all,
            keeps_changes=True,
            lag="always 0" if meets else "not defined",
            lag_counts="a worker's weights change only in its own steps, and in averages in lock step"
            if meets
            else "workers share no weights before the end of the run",
        )

    def __post_init__(self) -> None:
        refuse_unless(self.warmup >= 0, "warmup", self.warmup, ">= 0")
        if self.memory not in ("keep", "average", "reset"):
            raise Refused(f"memory is {self.memory!r}, but must be 'keep', 'average' or 'reset'")
        if self.memory != "keep" and "owner" in self.rule.needs:
            raise Refused(f"memory is {self.memory!r}, but must be 'keep': {self.rule} keeps its memory to itself")

        changes = self.codec is None or (self.outer is not None and self.weight is None)
        refuse_unless(changes, "codec", self.codec, "none: only changes that an outer rule applies are encoded")

    def check(self, workers: int, servers: int, batch_size: int, model: nn.Module) -> None:
        """Fixed weights must be given for every worker; a codec needs at least single precision."""
        halves = [p.dtype for p in model.parameters() if p.dtype in (torch.float16, torch.bfloat16)]
        refuse_unless(not halves or self.codec is None, "codec", self.codec, "none for weights in half precision")
        if isinstance(self.weight, FixedWeights):
            self.weight.check(workers)

    def remarks(self, steps: int) -> list[str]:
        """Where the rounds of such a run differ from the knobs."""
        return self.rounds.remarks(steps)

    def setup(self, w: Worker) -> None:
        """x, the worker's own weights; W, the weights at the start of a round; seconds of computing in this round."""
        self.slices = replica_slices(w.ops, w.flat, self.rule)
        self.starts: list[WeightSlice] = []
        if self.outer is not None:
            self.starts = replica_slices(w.ops, w.flat, self.outer, [group.weights.clone() for group in w.flat.groups])
        self.reducer = collective("auto", w.transport, w.workers)
        self.sum = None if self.codec is None else Gather(w, self.codec)
        self.rounds.begin(w.steps)
        self.computing = 0.0

    def step(self, w: Worker, batch: Batch) -> float:
        """A local step; at the end of a round all workers average."""
        began = w.transport.now()
        loss = w.gradient(batch)
        if w.step < self.warmup:
            self._warmup_step(w)
            return loss
        if self.weight is not None:
            self.weight.see(w, loss, len(batch[0]) if batch else w.batch_size)
        self._move(w)
        self.computing += w.transport.now() - began
        if self.rounds.step():
            self._combine(w, w.step + 1)
        return loss

    def _move(self, w: Worker, over: int = 1) -> None:
        """x <- x + rule(g)."""
        for group, weight_slice in zip(w.flat.groups, self.slices, strict=True):
            at = UpdateContext(weight_slice.weights, samples=w.samples, count=over)
            weight_slice.update(group.grad, at, group.untouched(), over=over)

    def _warmup_step(self, w: Worker) -> None:
        """A step with the mean gradient; the first round may start from its weights."""
        for group in w.flat.groups:
            self.reducer.all_reduce(group.outgoing)
        self._move(w, over=len(w.workers))
        for group, start in zip(w.flat.groups, self.starts, strict=False):
            w.ops.copy(group.weights, start.weights)

    @torch.no_grad()
    def _combine(self, w: Worker, steps: int) -> None:
        """The end of a round, after so many steps in all: all workers continue from the same weights."""
        before = w.samples_before(int(max(self.warmup, steps - self.rounds.taken)))
        began, taken = w.transport.now(), max(1.0, self.rounds.taken)
        weights = [None] * len(w.flat.groups) if self.weight is None else self.weight.take(w)
        for number, (group, weight) in enumerate(zip(w.flat.groups, weights, strict=True)):
            if self.starts:
                self._step_towards(w, number, self.starts[number], weight, before)
            else:
                w.ops.copy(average(w, self.reducer, group.weights, weight), group.weights)
        self._update_memory(w)
        self.rounds.end()
        self.rounds.measure(self.reducer, self.computing / taken, w.transport.now() - began)
        self.computing = 0.0

    def _step_towards(self, w: Worker, number: int, start: WeightSlice, weight: Tensor | None, samples: int) -> None:
        """W <- W + outer(W - x), of a round that began after so many samples.

        Differences of half-precision numbers are averaged as single ones.
        """
        x = w.flat.groups[number].weights
        workers, change = len(w.workers), w.ops.difference(start.weights, x)
        if self.sum is None:
            change = average(w, self.reducer, change, weight)
        else:
            self.sum.all_reduce(change, Span(number, 0, change.numel()))
            w.ops.divide(change, workers)
        at = UpdateContext(start.weights, samples=samples, count=workers, workers=workers)
        start.update(change.to(x.dtype), at)
        w.ops.copy(start.weights, x)

    def _update_memory(self, w: Worker) -> None:
        """Keep, average or reset the state of the local rule."""
        for weight_slice in self.slices if self.memory != "keep" else []:
            for state in weight_slice.states:
                for name in state if self.memory == "average" else ():
                    w.ops.copy(average(w, self.reducer, state[name]), state[name])
            if self.memory == "reset":
                weight_slice.forget()

    def finish(self, w: Worker) -> None:
        """Average after an incomplete round."""
        if self.rounds.taken and w.step > self.warmup:
            self._combine(w, w.step)

    def answer(self, w: Worker) -> Weights | None:
        """The average of all x, or the outcome of the outer rule at W."""
        if self.starts or not self.rounds.taken:
            return w.named(self._outcome(w)) if w.rank == w.lead else None
        gathered = gather(w, (), [group.weights for group in w.flat.groups])
        return None if gathered is None else w.named(mean(gathered))

    def _outcome(self, w: Worker) -> list[Tensor]:
        """The weights between two rounds, which are equal on all workers."""
        if not self.starts:
            return [group.weights for group in w.flat.groups]
        workers = len(w.workers)
        return [
            one.rule.outcome(UpdateContext(one.weights, one.states[0], workers=workers))
            if isinstance(one.rule, LooksAhead)
            else one.weights
            for one in self.starts
        ]

    # -- checkpoints ------------------------------------------------------------------------------

    def declared_state(self, w: Worker) -> StateParts:
        """W and the outer rule's state; every worker's x and the state of its rule; the position in the round."""
        slots, parts = w.flat.slots, dict[str, StatePart]()
        if self.starts:
            W = [start.weights for start in self.starts]
            parts["start"] = CustomState("shared", partial(named, slots, W), partial(self._begin_at, w))
            parts["outer"] = RuleState(slots, self.starts)
        parts["x"] = VectorState(slots, [group.weights for group in w.flat.groups])
        parts["rule"] = RuleState(slots, self.slices, "own")
        parts["round"] = CustomState("shared", self._position, self._set_position)
        if self.sum is not None:
            parts["sum"] = CustomState("all", self.sum.state, self.sum.restore)
        if self.weight is not None:
            parts["weight"] = CustomState("own", partial(self._weight_sums, w), partial(self._set_weight_sums, w))
        return parts

    def _begin_at(self, w: Worker, saved: Sequence[Saved]) -> None:
        """W; a new worker begins its round there, which may be ahead of the answer. The others load their own x."""
        load_vectors(w.flat.slots, [start.weights for start in self.starts], saved[0])
        for group, start in zip(w.flat.groups, self.starts, strict=True):
            w.ops.copy(start.weights, group.weights)

    def _position(self) -> Saved:
        return {"": torch.tensor([self.rounds.taken, self.rounds.length], dtype=torch.float64)}

    def _set_position(self, saved: Sequence[Saved]) -> None:
        """The length only if it was measured: otherwise the one that this run was given is in force."""
        self.rounds.taken, length = saved[0][""].tolist()
        if self.rounds.overhead is not None:
            self.rounds.length = length

    def _weight_sums(self, w: Worker) -> Saved:
        """By parameter, or by group of the model."""
        assert self.weight is not None
        sums = self.weight.sums
        if sums and self.weight.by_coordinate:
            return named(w.flat.slots, sums)
        return {str(number): x for number, x in enumerate(sums)}

    def _set_weight_sums(self, w: Worker, saved: Sequence[Saved]) -> None:
        assert self.weight is not None
        for sums in filter(None, saved):
            if self.weight.by_coordinate:
                groups = w.flat.groups
                self.weight.sums = [torch.cat([sums[slot.name] for slot in group.slots]) for group in groups]
            else:
                self.weight.sums = [sums[str(number)] for number in range(len(w.flat.groups))]
