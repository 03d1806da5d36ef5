"""LocalSteps: every worker trains on its own for a round, then all combine what they have found.

split  data        when  in rounds, in lock step        who  a collective
what   any Codec   how   any Rule within a round; between rounds the average, or an outer Rule that steps towards it

    x_k <- x_k + rule(g_k(x_k))                    as often as a round has steps
    x   =  sum_k a_k x_k                           a_k = 1/P, unless a Weight says otherwise
    x_k <- x                                       or, with an outer rule:
    W   <- W + outer(W - x);  x_k <- W             W is where rounds start

With a codec and an outer rule W - x_k travels encoded (topology/sums): what is lost of one round comes with the next.

Until `warmup` steps are over gradients are averaged instead, as in `allreduce`. What is left of a round when the run
ends makes a shorter one. The answer is the average, or what the outer rule makes of W.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from manyhands.consistency import Rounds
from manyhands.core.errors import Refused, refuse_unless
from manyhands.core.flat import Span
from manyhands.core.gather import gather, mean
from manyhands.core.holding import Holding, replica
from manyhands.core.protocols import At, Batch, Codec, Rule, Saved, Weights
from manyhands.core.saving import collect, join, named, own, pieces, place, restore, section, under, workers_in
from manyhands.core.worker import Worker
from manyhands.topology.averages import Fixed, Weight, average
from manyhands.topology.collectives import all_reducer
from manyhands.topology.sums import Gather


@runtime_checkable
class LooksAhead(Protocol):
    """An outer rule whose weights are not what is to be evaluated."""

    def outcome(self, at: At) -> Tensor:
        """What is."""


@dataclass
class LocalSteps:
    """Rounds of local training.

    Args:
        rule: how a worker applies its own gradient.
        rounds: how long they train on their own.
        outer: how a round is applied; None: its average is taken as it is.
        warmup: steps before the first round.
        memory: what becomes of a local rule's memory after a round.
        weight: how much each worker counts; None: all the same.
        draws_from_all: whether every worker may see any sample, instead of having a share of its own.
        codec: what a round has changed looks like on the wire; as it is, if not given.
    """

    rule: Rule
    rounds: Rounds = field(default_factory=Rounds)
    outer: Rule | None = None
    warmup: int = 0
    memory: Literal["keep", "average", "reset"] = "keep"
    weight: Weight | None = None
    draws_from_all: bool = False
    codec: Codec | None = None
    lockstep: ClassVar[bool] = True
    one_host: ClassVar[bool] = False

    def __post_init__(self) -> None:
        refuse_unless(self.warmup >= 0, "warmup", self.warmup, ">= 0")
        if self.memory not in ("keep", "average", "reset"):
            raise Refused(f"memory is {self.memory!r}, but must be 'keep', 'average' or 'reset'")
        if self.memory != "keep" and "owner" in self.rule.needs:
            raise Refused(f"memory is {self.memory!r}, but must be 'keep': {self.rule} keeps its memory to itself")

        changes = self.codec is None or (self.outer is not None and self.weight is None)
        refuse_unless(changes, "codec", self.codec, "none: only changes that an outer rule takes in are encoded")

    def check(self, workers: int, servers: int, batch_size: int, model: nn.Module) -> None:
        """Shares must be given for every worker; a codec takes what single precision has at least."""
        halves = [p.dtype for p in model.parameters() if p.dtype in (torch.float16, torch.bfloat16)]
        refuse_unless(not halves or self.codec is None, "codec", self.codec, "none for weights in half precision")
        if isinstance(self.weight, Fixed):
            self.weight.check(workers)

    def remarks(self, steps: int) -> list[str]:
        """What one should know about a run of that many steps."""
        return self.rounds.remarks(steps)

    def setup(self, w: Worker) -> None:
        """x, the worker's own weights; W, where rounds start; seconds of computing in this round."""
        self.held = replica(w.flat, self.rule)
        self.starts: list[Holding] = []
        if self.outer is not None:
            self.starts = replica(w.flat, self.outer, [part.weights.clone() for part in w.flat.parts])
        self.everyone = all_reducer("auto", w.transport, w.workers)
        self.sum = None if self.codec is None else Gather(w, self.codec)
        self.rounds.begin(w.steps)
        self.computing = 0.0

    def step(self, w: Worker, batch: Batch) -> float:
        """A step of one's own; at the end of a round all combine."""
        began = w.transport.now()
        loss = w.gradient(batch)
        if w.step < self.warmup:
            self.step_together(w)
            return loss
        if self.weight is not None:
            self.weight.see(w, loss, len(batch[0]) if batch else w.batch_size)
        self.move(w)
        self.computing += w.transport.now() - began
        if self.rounds.step():
            self.combine(w)
        return loss

    def move(self, w: Worker, over: int = 1) -> None:
        """x <- x + rule(g)."""
        for part, held in zip(w.flat.parts, self.held, strict=True):
            w.move(part.outgoing.nbytes)
            at = At(held.weights, samples=w.samples, count=over)
            held.update(part.grad, at, part.untouched(), over=over)

    def step_together(self, w: Worker) -> None:
        """Before the first round: a step with the mean gradient, to where the first round may start."""
        for part in w.flat.parts:
            self.everyone.all_reduce(part.outgoing)
        self.move(w, over=len(w.workers))
        for part, start in zip(w.flat.parts, self.starts, strict=False):
            start.weights.copy_(part.weights)

    @torch.no_grad()
    def combine(self, w: Worker) -> None:
        """The end of a round: everyone goes on from the same weights."""
        began, steps = w.transport.now(), max(1.0, self.rounds.taken)
        weights = [None] * len(w.flat.parts) if self.weight is None else self.weight.take(w)
        for number, (part, weight) in enumerate(zip(w.flat.parts, weights, strict=True)):
            w.move(2 * part.weights.nbytes)
            if self.starts:
                self.step_towards(w, number, part.weights, self.starts[number], weight)
            else:
                part.weights.copy_(average(self.everyone, len(w.workers), part.weights, weight))
        self.tend_memory(w)
        self.rounds.end()
        self.rounds.measure(self.everyone, self.computing / steps, w.transport.now() - began)
        self.computing = 0.0

    def step_towards(self, w: Worker, number: int, x: Tensor, start: Holding, weight: Tensor | None) -> None:
        """W <- W + outer(W - x); differences of half-precision numbers are averaged as single ones."""
        workers, away = len(w.workers), start.weights - x
        if self.sum is None:
            away = average(self.everyone, workers, away, weight)
        else:
            self.sum.add_up(away, Span(number, 0, away.numel()))
            away = away if away.is_meta else away.div_(workers)
        start.update(away.to(x.dtype), At(start.weights, samples=w.samples, count=workers, workers=workers))
        x.copy_(start.weights)

    def tend_memory(self, w: Worker) -> None:
        """What the local rule remembers is kept, averaged or forgotten."""
        for held in self.held if self.memory != "keep" else []:
            for state in held.states:
                for name in state if self.memory == "average" else ():
                    state[name].copy_(average(self.everyone, len(w.workers), state[name]))
            if self.memory == "reset":
                held.forget()

    def finish(self, w: Worker) -> None:
        """What is left of a round makes a shorter one."""
        if self.rounds.taken and w.step > self.warmup:
            self.combine(w)

    def answer(self, w: Worker) -> Weights | None:
        """The average, or what the outer rule makes of where the next round would start."""
        if self.starts or not self.rounds.taken:
            return w.named(self.outcome(w)) if w.rank == w.lead else None
        gathered = gather(w, (), [part.weights for part in w.flat.parts])
        return None if gathered is None else w.named(mean(gathered))

    def outcome(self, w: Worker) -> list[Tensor]:
        """What is the same on all workers: the weights between two rounds."""
        if not self.starts:
            return [part.weights for part in w.flat.parts]
        workers = len(w.workers)
        return [
            one.rule.outcome(At(one.weights, one.states[0], workers=workers))
            if isinstance(one.rule, LooksAhead) and not one.weights.is_meta
            else one.weights
            for one in self.starts
        ]

    # -- checkpoints ------------------------------------------------------------------------------

    def state(self, w: Worker) -> Saved | None:
        """Every worker's x and what its rule remembers; where rounds start, and how far this one is."""
        places = w.flat.places
        x = named(places, [part.weights for part in w.flat.parts])
        sums = {} if self.weight is None else {str(n): x for n, x in enumerate(self.weight.sums)}
        mine = under("x", x) | under("rule", join(pieces(self.held, places))) | under("weight", sums)
        mine |= {} if self.sum is None else under("sum", self.sum.state())
        saved = collect(w, mine, of_all=True)
        if saved is None:
            return None
        starts = named(places, [start.weights for start in self.starts]) if self.starts else {}
        outer = under("start", starts) | under("outer", join(pieces(self.starts, places)))
        where = torch.tensor([self.rounds.taken, self.rounds.length], dtype=torch.float64)
        return saved | outer | {"round": where}

    def restore(self, w: Worker, saved: Saved) -> None:
        """Each its own; a new worker begins at the answer with a fresh rule."""
        places = w.flat.places
        self.rounds.taken, self.rounds.length = saved["round"].tolist()
        place(places, [start.weights for start in self.starts], section(saved, "start"))
        restore(self.starts, places, section(saved, "outer"))
        if self.sum is not None:
            self.sum.restore([section(one, "sum") for one in workers_in(saved)])
        if mine := own(w, saved):
            place(places, [part.weights for part in w.flat.parts], section(mine, "x"))
            restore(self.held, places, section(mine, "rule"))
            if self.weight is not None:
                self.weight.sums = list(section(mine, "weight").values())
