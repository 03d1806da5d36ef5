"""How many versions of its weights a rank of a pipeline keeps, and what its rule keeps for each of them.

The row of the rank is played on a few weights by the method's own policy and rule, with gradients of 0:

    F(m)  forward       B(m)  backward       U(m)  moves, an update, updated       A(m)  settle
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from manyhands.core.flat import Flat
from manyhands.core.footprint import rule_bytes
from manyhands.core.rule import Chooses, UpdateContext
from manyhands.core.vector_ops import UNCHARGED
from manyhands.splits.schedules import Rows
from manyhands.splits.schedules.timeline import Action
from manyhands.splits.versions import StageWeights, Versions
from manyhands.strategies.pipeline_plan import PipelinePlan

FEW = 4096
"""Weights: so many that numbers which a rule keeps for a whole tensor do not count."""


class VersionBytes(NamedTuple):
    """What a rank keeps, in bytes for each byte of its weights."""

    kept: int
    """How many versions, the live one too."""
    others: float
    """Of all versions but the live one."""
    optimizer: float | None
    """Of the rule; None: not known."""


def version_bytes(plan: PipelinePlan, rows: Rows) -> list[VersionBytes]:
    """What each rank keeps; the version that stage 0 has chosen for a micro-batch travels to the other stages."""
    if plan.rule is None:
        return [VersionBytes(1, 0.0, None)] * plan.ranks
    chosen: dict[int, int | None] = {}
    if plan.flushes:
        rows = [[Action(op, 0, 0) for op in "FBU"]] * plan.ranks
    found = [_Player(plan, index, chosen).play(row) for index, row in enumerate(rows)]
    return [one._replace(optimizer=None) for one in found] if isinstance(plan.rule, Chooses) else found


class _Player:
    """One rank with a few weights."""

    def __init__(self, plan: PipelinePlan, index: int, chosen: dict[int, int | None]) -> None:
        assert plan.rule is not None
        self.layer = nn.Linear(FEW, 1, bias=False)
        self.flat = Flat(dict(self.layer.named_parameters()))
        rule = copy.deepcopy(plan.rule)
        stage, count = plan.placed[index][0], 1 + max(map(max, plan.placed))
        weights = StageWeights(self.flat, [self.layer.weight], rule, UNCHARGED, stage, count, plan.every)
        self.policy: Versions = plan.policy(weights)
        self.is_first, self.chosen = stage == 0, chosen
        self.waiting: list[int] = []
        self.kept = self.others = 0

    @torch.no_grad()
    def play(self, row: Sequence[Action]) -> VersionBytes:
        for op, m, _ in row:
            if op == "F":
                _, self.chosen[m] = self.policy.forward(m, None if self.is_first else self.chosen.get(m))
            elif op == "B":
                self.policy.backward(m)
                self.waiting.append(m)
            elif op == "U":
                self._update(m)
            elif op == "A":
                self.policy.settle()
            if op == "F":
                self._note()
        weights = self.layer.weight.nbytes
        optimizer = rule_bytes(self.policy)
        return VersionBytes(self.kept, self.others / weights, optimizer / weights)

    def _update(self, m: int) -> None:
        for one in self.waiting:
            self.policy.done(one)
        self.waiting.clear()
        for piece in self.policy.moves(m):
            piece.update(torch.zeros(FEW), UpdateContext(piece.weights), frozenset())
        self._note()
        self.policy.updated(m)

    def _note(self) -> None:
        self.kept = max(self.kept, self.policy.kept)
        self.others = max(self.others, sum(x.nbytes for x in self.policy.others))
