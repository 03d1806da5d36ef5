"""Compressed: every worker has the whole model; encoded gradients are summed over all before each step.

split  data        when  bulk                   who  a compressed all-reduce (collectives/compressed)
what   any Codec   how   any Rule, the same on every worker

    s_k = C(g_k)                       C may keep the error in memory and add it to the next gradient
    g = (1/P) sum_k D(s_k)             all ranks end with the same bits
    w <- w + rule(g)

For the first `dense` steps gradients are summed uncompressed, as in AllReduce: while weights move fast, the delay that
error memory causes does harm.

A GradientExchange holds the knobs of a compressed all-reduce:

    Encoded    any codec; payloads go to all workers (gather), to the owners of stripes (stripes), or from partner to
               partner (sparcml)
    LowRank    no codec: two thin matrices replace each large one
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol, get_args

from manyhands.collectives import collective
from manyhands.collectives.compressed import (
    CompressedSum,
    Gather,
    Hierarchical,
    LowRankSum,
    Sparcml,
    Stripes,
    Untouched,
    check_pairs,
)
from manyhands.core.codec import Codec
from manyhands.core.declared_state import CustomState, RuleState, StateParts
from manyhands.core.errors import refuse_unless
from manyhands.core.flat import DtypeGroup, Span
from manyhands.core.rule import Rule
from manyhands.core.strategy import Batch, Strategy, Traits, Weights
from manyhands.core.weight_slice import replica_slices
from manyhands.core.worker import Worker

Way = Literal["gather", "stripes", "sparcml"]


class GradientExchange(Protocol):
    """The knobs of a compressed all-reduce."""

    def begin(self, w: Worker) -> CompressedSum:
        """The all-reduce of this run, with its error memory."""


@dataclass(frozen=True)
class Encoded:
    """An all-reduce of payloads of any codec.

    Args:
        codec: C and D.
        way: which payloads are sent where: all to all workers (gather), stripes to their owners, which send the sum
            back (stripes), or sparse vectors from partner to partner (sparcml).
        by_host: whether the workers of a host first sum their gradients uncompressed and then take part as one.
        algorithm: of sparcml: double, split or dense; auto chooses by the expected number of nonzero elements.
        values: the codec of a sum that has become dense in sparcml; None: uncompressed.
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

    def begin(self, w: Worker) -> CompressedSum:
        """Among all workers, or among the first worker of every host."""
        return Hierarchical(w, partial(self._among, w)) if self.by_host else self._among(w, w.workers)

    def _among(self, w: Worker, ranks: Sequence[int]) -> CompressedSum:
        if self.way == "gather":
            return Gather(w, self.codec, ranks)
        if self.way == "stripes":
            return Stripes(w, self.codec, ranks)
        return Sparcml(w, self.codec, ranks, algorithm=self.algorithm, values=self.values)


@dataclass(frozen=True)
class LowRank:
    """A low-rank approximation of each large gradient matrix.

    Args:
        rank: r, the number of columns of the thin matrices.
        least_rate: the least compression rate; a parameter that would be compressed less is summed uncompressed.
    """

    rank: int = 1
    least_rate: float = 2.0

    def __post_init__(self) -> None:
        refuse_unless(self.rank >= 1, "rank", self.rank, ">= 1")
        refuse_unless(self.least_rate >= 1, "least_rate", self.least_rate, ">= 1")

    def begin(self, w: Worker) -> CompressedSum:
        """The sum among all workers."""
        return LowRankSum(w, self.rank, self.least_rate)


@dataclass
class Compressed(Strategy):
    """Bulk-synchronous training with encoded gradients.

    Args:
        rule: how the mean gradient is applied.
        exchange: how gradients are summed.
        dense: how many steps at the beginning are uncompressed.
    """

    rule: Rule
    exchange: GradientExchange
    dense: int = 0

    @property
    def traits(self) -> Traits:
        return Traits(
            lockstep=True,
            on_worker_loss="ends",
            averages_gradients=True,
            equal_replicas=True,
            keeps_changes=True,
            lag="always 0",
            lag_counts="all workers update together",
        )

    def __post_init__(self) -> None:
        refuse_unless(self.dense >= 0, "dense", self.dense, ">= 0")

    def setup(self, w: Worker) -> None:
        """The weights with their rule; the compressed all-reduce with its memory; one for the first, dense steps."""
        self.slices = replica_slices(w.ops, w.flat, self.rule)
        self.sum = self.exchange.begin(w)
        self.plain = collective("auto", w.transport, w.workers)

    def step(self, w: Worker, batch: Batch) -> float:
        """Compute, sum over all workers, update."""
        loss = w.gradient(batch)
        for number, (group, weight_slice) in enumerate(zip(w.flat.groups, self.slices, strict=True)):
            if w.step < self.dense:
                self.plain.all_reduce(group.outgoing)
            else:
                span = Span(number, 0, group.weights.numel())
                count_touched(group, self.sum.all_reduce(group.grad, span, group.untouched()))
            weight_slice.apply_sum(group, len(w.workers), w.samples)
        return loss

    def answer(self, w: Worker) -> Weights | None:
        """The lead's replica: all are equal."""
        return w.named() if w.rank == w.lead else None

    def declared_state(self, w: Worker) -> StateParts:
        """The rule's state, which is equal on every worker, and each worker's error memory."""
        return {
            "rule": RuleState(w.flat.slots, self.slices),
            "sum": CustomState("all", self.sum.state, self.sum.restore),
        }


def count_touched(group: DtypeGroup, untouched: Untouched) -> None:
    """Set the touch counts after a sum: 0 if no worker touched a parameter and the sum has nothing of earlier steps."""
    if group.untouched():
        group.touch_counts.fill_(1)
    first = group.slots[0].param_id
    for slot in group.slots if untouched else ():
        if slot.param_id in untouched and not bool(group.grad[slot.span.start : slot.span.stop].any()):
            group.touch_counts[slot.param_id - first] = 0
