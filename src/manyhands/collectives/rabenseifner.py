"""Rabenseifner: halve the vector until each rank has the sum of one block, then double back to the whole.

What each rank sends and to which, P = 4 and m = 8:

    round         rank 0   rank 1   rank 2   rank 3
    1  halve     4:8 → 2  4:8 → 3  0:4 → 0  0:4 → 1
    2  halve     2:4 → 1  0:2 → 0  6:8 → 3  4:6 → 2
       owns          0:2      2:4      4:6      6:8
    3  double    0:2 → 1  2:4 → 0  4:6 → 3  6:8 → 2
    4  double    0:4 → 2  0:4 → 3  4:8 → 0  4:8 → 1

    halve   d = P/2, ..., 1:  partner r xor d; keep the lower half if the bit is 0, else the upper; send the other
    double  d = 1, ..., P/2:  swap what you have with the same partner

    T = 2 L lg P + 2 γ m G (P - 1) / P       2 lg P rounds, 2 m (P - 1) / P elements sent per rank

As few bytes as a ring in far fewer rounds. Blocks may be of unequal length, also empty. Each block is summed by one
rank, so all ranks end with the same bits. Other numbers of ranks: see `fold`.

reduce_scatter is the halving and all_gather the doubling, each with half the rounds and half the elements; the block
of a rank that stands for its companion too is the span of both.

Lending: the half lent to a partner returns from the same partner, complete. What doubling sends is lent from the
outbox, which is written when halving has received from every partner in this call.

Reference: R. Rabenseifner, "Optimization of collective reduction operations", 2004,
https://doi.org/10.1007/978-3-540-24685-5_1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from manyhands.collectives.fold import Fold
from manyhands.collectives.group import Outbox, check_length, check_op, copy, vector
from manyhands.collectives.plain import PlainCollective
from manyhands.core.port import ReduceOp, Transport


class Halving(NamedTuple):
    """One step: the part that this rank keeps, and the one that its partner keeps."""

    partner: int
    mine: slice
    theirs: slice


def halvings(r: int, edges: Sequence[int]) -> list[Halving]:
    """The steps of rank r, a power of two in all, whose blocks lie between these edges; at last `mine` is block r."""
    steps, low, d = [], 0, (len(edges) - 1) // 2
    while d:
        lower, upper = slice(edges[low], edges[low + d]), slice(edges[low + d], edges[low + 2 * d])
        mine, theirs = (upper, lower) if r & d else (lower, upper)
        steps.append(Halving(r ^ d, mine, theirs))
        low, d = low + (r & d), d // 2
    return steps


class Rabenseifner(PlainCollective):
    """Collectives by recursive halving and doubling, for any number of ranks and elements."""

    def __init__(self, transport: Transport, ranks: Sequence[int]) -> None:
        super().__init__(transport, ranks, "rabenseifner")
        self._fold = Fold(self._group)
        self._outbox = Outbox()

    def all_reduce(self, x: Tensor, op: ReduceOp = "sum") -> None:
        """Halve in place, double through the outbox."""
        check_op(op)
        x, group, fold = vector(x), self._group, self._fold
        group.begin()
        if group.size == 1 or not fold.enter(x, op):
            return
        steps = halvings(fold.inner, [x.numel() * index // fold.power for index in range(fold.power + 1)])
        for step in steps:
            partner = fold.outer(step.partner)
            group.send(partner, x[step.theirs])
            group.reduce_into(partner, x[step.mine], op)
        lent = self._outbox.like(x)
        copy(x[steps[-1].mine], lent[steps[-1].mine])
        for number, step in reversed(list(enumerate(steps))):
            partner = fold.outer(step.partner)
            group.send(partner, lent[step.mine])
            sent_on = number > 0 or fold.companion is not None
            group.copy_into(partner, x[step.theirs], *([lent[step.theirs]] if sent_on else []))
        fold.leave(lent)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Halve; each sum is new memory, lent and not written again."""
        x, group, fold = vector(x), self._group, self._fold
        group.begin()
        own = self._spans(x)[group.index_in_group]
        if fold.companion is not None and not fold.takes_part:
            group.send(fold.companion, x)
            mine = torch.empty_like(x[own])
            group.copy_into(fold.companion, mine)
            return mine
        total = x.clone() if fold.companion is None else group.reduced(fold.companion, x)
        start = 0
        for partner, mine_span, theirs in self._halvings(x):
            group.send(fold.outer(partner), total[theirs.start - start : theirs.stop - start])
            total = group.reduced(fold.outer(partner), total[mine_span.start - start : mine_span.stop - start])
            start = mine_span.start
        if fold.companion is not None:
            group.send(fold.companion, total[: own.start - start])
        return total[own.start - start : own.stop - start]

    def all_gather(self, mine: Tensor, out: Tensor) -> None:
        """Double, in new memory that is lent while other parts of it are still filled."""
        mine, out, group, fold = vector(mine), vector(out), self._group, self._fold
        group.begin()
        spans = self._spans(out)
        check_length("mine", mine, spans[group.index_in_group])
        if fold.companion is not None and not fold.takes_part:
            group.send(fold.companion, mine)
            group.copy_into(fold.companion, out)
            return
        lent = torch.empty_like(out)
        copy(mine, lent[spans[group.index_in_group]])
        if fold.companion is not None:
            group.copy_into(fold.companion, lent[spans[fold.companion]])
        for step in reversed(self._halvings(out)):
            partner = fold.outer(step.partner)
            group.send(partner, lent[step.mine])
            group.copy_into(partner, lent[step.theirs])
        fold.leave(lent)
        copy(lent, out)

    def _halvings(self, x: Tensor) -> list[Halving]:
        """The steps after which each rank has its span, and that of its companion."""
        edges = [x.numel() * self._fold.first(inner) // self._group.size for inner in range(self._fold.power)]
        return halvings(self._fold.inner, [*edges, x.numel()])
