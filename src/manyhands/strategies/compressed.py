"""Compressed: every worker has the whole model; encoded gradients are summed over all before each step.

split  data        when  bulk                   who  a sum of encoded vectors (topology/sums)
what   any Codec   how   any Rule, the same on every worker

    s_k = C(g_k)                       C may remember what it could not send, and send it later
    g = (1/P) sum_k D(s_k)             all ranks end with the same bits
    w <- w + rule(g)

For the first `dense` steps gradients are summed as they are, as in AllReduce: when weights move fast, a codec that is
late does harm.

Which of the sums it is, and what it needs to know, an Exchange says:

    Encoded    any codec; whom to tell: everyone (gather), owners of stripes (stripes), partners (sparcml)
    LowRank    no codec: two thin matrices instead of each large one
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal, Protocol, get_args

from manyhands.core.errors import refuse_unless
from manyhands.core.flat import Part, Span
from manyhands.core.holding import replica
from manyhands.core.protocols import Batch, Codec, Rule, Saved, Weights
from manyhands.core.saving import collect, join, pieces, restore, section, under, workers_in
from manyhands.core.worker import Worker
from manyhands.strategies.allreduce import apply_sum
from manyhands.topology.collectives import all_reducer
from manyhands.topology.sums import Gather, Hierarchical, LowRankSum, Sparcml, Stripes, Sum, check_pairs

Way = Literal["gather", "stripes", "sparcml"]


class Exchange(Protocol):
    """How gradients are summed: knobs only."""

    def begin(self, w: Worker) -> Sum:
        """The sum for this run, with its memory."""


@dataclass(frozen=True)
class Encoded:
    """Any codec.

    Args:
        codec: C and D.
        way: who is told what: everything to everyone (gather), stripes to their owners, who tell the sum (stripes), or
            sparse vectors from partner to partner (sparcml).
        by_host: whether those of one host first add up what they have, as it is, and then come as one.
        algorithm: of sparcml: double, split or dense; auto: by how many numbers are to be expected.
        values: how sparcml tells a sum that has become dense; as it is, if not given.
    """

    codec: Codec
    way: Way = "gather"
    by_host: bool = False
    algorithm: Literal["auto", "double", "split", "dense"] = "auto"
    values: Codec | None = None

    def __post_init__(self) -> None:
        refuse_unless(self.way in get_args(Way), "exchange", self.way, f"one of {', '.join(get_args(Way))}")
        if self.way == "sparcml":
            check_pairs(self.codec)

    def begin(self, w: Worker) -> Sum:
        """Among all workers, or among the first of every host."""
        return Hierarchical(w, partial(self._among, w)) if self.by_host else self._among(w, w.workers)

    def _among(self, w: Worker, ranks: Sequence[int]) -> Sum:
        if self.way == "gather":
            return Gather(w, self.codec, ranks)
        if self.way == "stripes":
            return Stripes(w, self.codec, ranks)
        return Sparcml(w, self.codec, ranks, algorithm=self.algorithm, values=self.values)


@dataclass(frozen=True)
class LowRank:
    """Two thin matrices instead of each large one.

    Args:
        rank: r, how thin.
        least_rate: by how much they must be smaller at least, or a parameter is summed as it is.
    """

    rank: int = 1
    least_rate: float = 2.0

    def __post_init__(self) -> None:
        refuse_unless(self.rank >= 1, "rank", self.rank, ">= 1")
        refuse_unless(self.least_rate >= 1, "least_rate", self.least_rate, ">= 1")

    def begin(self, w: Worker) -> Sum:
        """Among all workers."""
        return LowRankSum(w, self.rank, self.least_rate)


@dataclass
class Compressed:
    """Bulk-synchronous training with encoded gradients.

    Args:
        rule: how the mean gradient is applied.
        exchange: how gradients are summed.
        dense: steps at the beginning in which they are summed as they are.
    """

    rule: Rule
    exchange: Exchange
    dense: int = 0
    lockstep: ClassVar[bool] = True
    one_host: ClassVar[bool] = False

    def __post_init__(self) -> None:
        refuse_unless(self.dense >= 0, "dense", self.dense, ">= 0")

    def setup(self, w: Worker) -> None:
        """The weights with their rule; the sum, with what codecs remember; a collective for what is not encoded."""
        self.held = replica(w.flat, self.rule)
        self.sum = self.exchange.begin(w)
        self.plain = all_reducer("auto", w.transport, w.workers)

    def step(self, w: Worker, batch: Batch) -> float:
        """Compute, sum over everyone, update."""
        loss = w.gradient(batch)
        for number, (part, held) in enumerate(zip(w.flat.parts, self.held, strict=True)):
            if w.step < self.dense:
                self.plain.all_reduce(part.outgoing)
            else:
                self.plain.all_reduce(part.marks)
                self.sum.add_up(part.grad, Span(number, 0, part.weights.numel()))
                mark_late(part)
            apply_sum(w, part, held)
        return loss

    def answer(self, w: Worker) -> Weights | None:
        """All replicas are equal."""
        return w.named() if w.rank == w.lead else None

    # -- checkpoints ------------------------------------------------------------------------------

    def state(self, w: Worker) -> Saved | None:
        """What the rule remembers, which is the same on every worker, and what each has not sent yet."""
        saved = collect(w, under("sum", self.sum.state()), of_all=True)
        return None if saved is None else saved | under("rule", join(pieces(self.held, w.flat.places)))

    def restore(self, w: Worker, saved: Saved) -> None:
        """The rule's for everyone; what was not sent goes to those that are there now."""
        restore(self.held, w.flat.places, section(saved, "rule"))
        self.sum.restore([section(one, "sum") for one in workers_in(saved)])


def mark_late(part: Part) -> None:
    """A parameter that nobody has touched in this step is touched if something of an earlier one has come."""
    for place in part.places if part.untouched() else ():
        here = part.grad[place.span.start : place.span.stop]
        if bool(here.any()):
            part.marks[place.mark - part.places[0].mark] = 1
