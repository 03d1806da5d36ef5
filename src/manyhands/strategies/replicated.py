"""Replicated: a pipeline that streams, whose stages several ranks may replicate (PipeDream).

    replicas = (2, 1)     rank 0   stage 0, mini-batches 0, 2, 4, ...
                          rank 1   stage 0, mini-batches 1, 3, 5, ...
                          rank 2   stage 1, all mini-batches

    B(m)   as in any stream; the gradient is sent to the other replicas of the stage
    U(m)   the gradients of a round are summed in the order of the mini-batches: all replicas apply the same bits

An update is made in the step in which the last replica of the round has its gradient. So what a rank does in a step
waits for nothing that another rank does in a later one, and a user's loop may have a barrier after each.

Sums, and not means: a mini-batch counts the same on every stage, however many replicas a stage has.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from manyhands.core.errors import refuse_unless
from manyhands.core.port import Tag, recv
from manyhands.core.strategy import Batch
from manyhands.core.worker import Worker
from manyhands.splits.schedules import placed, warm_up
from manyhands.splits.stage_passes import StagePasses
from manyhands.strategies.streaming import Streaming

REPLICA = Tag("replica-gradient", carries="vectors")


@dataclass(kw_only=True)
class Replicated(Streaming):
    """Training with replicated stages.

    Args:
        replicas_of: by stage, how many ranks have it.
    """

    replicas_of: tuple[int, ...]

    @property
    def kind(self) -> str:
        """A checkpoint may be resumed with other replicas, or without."""
        return super().kind.replace(type(self).__name__, Streaming.__name__)

    def check(self, workers: int, servers: int, batch_size: int, model: nn.Module) -> None:
        needed = sum(self.replicas_of)
        refuse_unless(workers == needed, "the number of workers", workers, f"{needed}, the sum of replicas")
        super().check(len(self.replicas_of), servers, batch_size, model)

    def _stage_of(self, w: Worker) -> tuple[int, int]:
        self.ranks = [[w.workers[index] for index in group] for group in placed(len(w.workers), self.replicas_of)]
        index = next(s for s, ranks in enumerate(self.ranks) if w.rank in ranks)
        self.own_gradient: list[Tensor] = []
        members = self.ranks[index]
        self.round = (1 + warm_up(len(w.workers), [w.workers.index(rank) for rank in members])) * len(members)
        return index, len(self.ranks)

    def _make_passes(self, w: Worker, module: nn.Module, depth: int) -> StagePasses:
        passes = partial(StagePasses, index=self.index, stages=len(self.ranks), rank_of=self._rank_of)
        return passes(w, w.transport, module, depth, meter=self.meter)

    def _rank_of(self, stage: int, m: int) -> int:
        return self.ranks[stage][(m - self.first) % len(self.ranks[stage])]

    def _must_wait(self, until: str) -> bool:
        is_open = self.action.op == "U" and self.action.m + self.round > self.taken
        return super()._must_wait(until) or (until == "F" and is_open)

    def _take_in(self, w: Worker, batch: Batch) -> None:
        """Keep the data of own mini-batches only."""
        super()._take_in(w, batch)
        m = self.taken - 1
        if self._rank_of(self.index, m) != w.rank:
            self.in_flight[m].fields = ()

    def _backward(self, w: Worker, m: int) -> None:
        super()._backward(w, m)
        others = [rank for rank in self.ranks[self.index] if rank != w.rank]
        if others:
            w.flat.close()
            self.own_gradient = [w.ops.clone(group.outgoing) for group in w.flat.groups]
            for rank in others:
                w.transport.send(rank, REPLICA.of(m), (), self.own_gradient)

    def _joined(self, w: Worker, m: int, own: list[int]) -> list[int]:
        """Those of a round: one of each replica, fewer at the end of a run."""
        ranks = self.ranks[self.index]
        joined = list(range(m, min(m + len(ranks), self.taken)))
        for number, one in enumerate(joined if len(ranks) > 1 else ()):
            self._add(w, one, is_first=number == 0)
        return joined

    def _add(self, w: Worker, m: int, is_first: bool) -> None:
        """Add the gradient of one mini-batch, with its touch counts."""
        rank = self._rank_of(self.index, m)
        message = None if rank == w.rank else recv(w.transport, REPLICA.of(m), frm=rank)
        found = self.own_gradient if message is None else message.tensors
        for group, g in zip(w.flat.groups, found, strict=True):
            if is_first:
                w.ops.copy(g, group.outgoing)
            else:
                w.ops.add(group.outgoing, g)
        if message is not None:
            message.release()
