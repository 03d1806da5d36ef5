"""Sandblaster: L-BFGS on large batches, in small portions, with vectors that no rank has whole.

split  data, in portions    when  every batch, in lock step     who  a coordinator, keepers of vectors
what   raw gradients; samples of portions that others compute   how   L-BFGS with a line search

    worker       bring mini-batches;  the last of a batch waits until the weights have moved
    replica      fetch w + t d, once per pass;  g = gradient of a portion;  push it to every keeper      (this file)
    coordinator  cut the batch, order portions, copy the late ones, search along d          (strategies/coordinator.py)
    keeper       its stretch of w, d, g and of the history;  sums of portions in their order  (topology/keeping.py)

Every worker is a replica too, beside its own program, so that a late portion holds nobody up. Sums are in the order of
portions: who computed which, and how often, makes no difference to the last bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from manyhands.core.errors import Diverged, Refused, refuse_unless
from manyhands.core.fields import Fields
from manyhands.core.gather import gather
from manyhands.core.protocols import Batch, Message, Saved, Weights, recv
from manyhands.core.saving import section, under
from manyhands.core.worker import Worker
from manyhands.rules.lbfgs import Pair
from manyhands.rules.wolfe import LineSearch, strong_wolfe
from manyhands.strategies.coordinator import (
    BRING,
    END,
    FREE,
    IMPROVED,
    NO_MORE,
    ORDER,
    REST_NOW,
    RESTED,
    Coordinator,
    Knobs,
)
from manyhands.topology.keeping import Keeper
from manyhands.topology.servers import check_servers
from manyhands.topology.sharded import Sharded, keepers


@dataclass
class Sandblaster:
    """Distributed L-BFGS.

    Args:
        lr: the step that a line search begins with.
        history: m, how many pairs of steps and gradient differences are remembered.
        portion: samples of a portion.
        batches: mini-batches of every worker that make one batch.
        iterations: steps of L-BFGS on one batch.
        search: how far to go along a direction.
    """

    lr: float = 1.0
    history: int = 10
    portion: int = 32
    batches: int = 4
    iterations: int = 3
    search: LineSearch = field(default=strong_wolfe, repr=False)
    lockstep: ClassVar[bool] = True
    one_host: ClassVar[bool] = False

    def __post_init__(self) -> None:
        refuse_unless(0 < self.lr < math.inf, "lr", self.lr, "> 0 and finite")
        refuse_unless(self.history >= 0, "history", self.history, ">= 0")
        for name in ("portion", "batches", "iterations"):
            refuse_unless(getattr(self, name) >= 1, name, getattr(self, name), ">= 1")

    def check(self, workers: int, servers: int, batch_size: int, model: nn.Module) -> None:
        """There must be something to keep for every server."""
        check_servers(servers, model)

    def setup(self, w: Worker) -> None:
        """The way to the keepers; the mini-batches of this batch; who coordinates; what this rank does beside."""
        if w.task.sizes_only:
            raise Refused("a line search needs a task with real data: sizes only have no loss")
        spans = keepers(w)
        self.sharded = Sharded(w, spans)
        self.lead = w.workers[0]
        self.own: dict[int, Fields] = {}
        self.loss: float | None = None
        self.has = 0
        self.ended = False
        if w.rank in spans:
            w.transport.spawn(Keeper(w, self.lead, spans).serve)
        if w.rank == self.lead:
            knobs = Knobs(self.lr, self.history, self.portion, self.batches, self.iterations, self.search)
            self.coordinator = Coordinator(w, Sharded(w, spans), knobs)
            w.transport.spawn(self.coordinator.run)
        self.replica = w.transport.spawn(lambda: self.compute(w))

    def serve(self, w: Worker) -> None:
        """Keep a stretch of all vectors."""
        Keeper(w, w.workers[0], keepers(w)).serve()

    def step(self, w: Worker, batch: Batch) -> float | None:
        """Bring a mini-batch. If it completes a batch, wait until the weights have moved."""
        if len(self.own) == self.batches:
            self.own = {}
        mine = self.own[w.step] = _copy(batch)
        w.transport.send(self.lead, BRING, (w.step, mine.names), mine)
        if len(self.own) == self.batches:
            (self.loss,) = recv(w.transport, IMPROVED, frm=self.lead).meta
        return self.loss

    # -- the replica, an activity -----------------------------------------------------------------

    def compute(self, w: Worker) -> None:
        """Compute what the coordinator orders, until it says that this is the end."""
        while True:
            order = recv(w.transport, ORDER, END, frm=self.lead)
            if order.tag == END:
                return
            number, portion, owner, step, start, stop, names = order.meta
            batch = self.samples(order, step, start, stop, names)
            loss = math.nan
            if batch is not None and self.fetch(number):
                loss = self.push(w, number, portion, batch, (owner, step, start))
            w.transport.send(self.lead, FREE, (number, portion, loss))

    def samples(self, order: Message, step: int, start: int, stop: int, names: tuple[str, ...]) -> Fields | None:
        """What came with an order, or some of the own samples; None if these are of a batch that is over."""
        if order.tensors:
            fields = order.keep()
        elif (mine := self.own.get(step)) is not None:
            fields = tuple(one[start:stop] for one in mine)
        else:
            return None
        return _fields(fields, names)

    def fetch(self, number: int) -> bool:
        """Have the weights of a pass; False if it is over."""
        if self.has != number:
            self.has = number if self.sharded.fetch(number) else 0
        return self.has == number

    def push(self, w: Worker, number: int, portion: int, batch: Fields, origin: tuple[int, int, int]) -> float:
        """The sum of the gradients of some samples, to all keepers; a loss that is no number has no gradient."""
        samples = len(batch[0])
        try:
            loss = w.gradient(batch, origin=origin) * samples
            gradients = [part.grad * samples for part in w.flat.parts]
        except Diverged as diverged:
            loss, gradients = diverged.loss, [torch.zeros_like(part.grad) for part in w.flat.parts]
        self.sharded.push(number, portion, gradients)
        return loss

    # -- the end ----------------------------------------------------------------------------------

    def finish(self, w: Worker) -> None:
        """Bring no more; compute for the others until nobody does."""
        w.transport.send(self.lead, NO_MORE)
        self.replica.join()
        self.ended = True

    def answer(self, w: Worker) -> Weights | None:
        """What the keepers have."""
        if gather(w) is None:
            return None
        if w.rank != self.lead:
            recv(w.transport, IMPROVED, frm=self.lead)  # says why the coordinator does not lead any more
        return w.named(self.sharded.read(last=self.ended))

    # -- checkpoints ------------------------------------------------------------------------------

    def rest(self, w: Worker) -> None:
        """Use up what was brought of an incomplete batch, and wait until nobody computes."""
        w.transport.send(self.lead, REST_NOW)
        recv(w.transport, RESTED, frm=self.lead)
        self.own = {}

    def go_on(self, w: Worker) -> None:
        """A new batch begins with the next mini-batch."""

    def state(self, w: Worker) -> Saved | None:
        """The history, and how often the weights have moved."""
        if w.rank != self.lead:
            return None
        pairs = self.coordinator.history.pairs
        vectors = self.sharded.save([name for pair in pairs for name in (pair.s, pair.y)])
        numbers = torch.tensor(pairs, dtype=torch.float64).reshape(len(pairs), 3)
        return under("history", vectors) | {"pairs": numbers, "moves": torch.tensor(self.coordinator.moves)}

    def restore(self, w: Worker, saved: Saved) -> None:
        """The lead tells the keepers; of a longer history the newest pairs are kept."""
        if w.rank != self.lead:
            return
        pairs = [Pair(int(number), sy, yy) for number, sy, yy in saved["pairs"].tolist()]
        pairs = pairs[max(0, len(pairs) - self.history) :]
        kept = {name for pair in pairs for name in (pair.s, pair.y)}
        self.sharded.restore({n: x for n, x in section(saved, "history").items() if n.rpartition("/")[2] in kept})
        self.coordinator.history.go_on_from(pairs)
        self.coordinator.moves = int(saved["moves"])


def _copy(batch: Batch) -> Fields:
    """A mini-batch to keep and to lend: its owner may use its memory again. Portions of it travel, so it has rows."""
    names = batch.names if isinstance(batch, Fields) else ()
    for number, one in enumerate(batch):
        if not isinstance(one, Tensor) or not one.dim() or len(one) != len(batch[0]):
            what = f"a tensor of shape {tuple(one.shape)}" if isinstance(one, Tensor) else f"a {type(one).__name__}"
            raise Refused(f"field {number} of a step is {what}, but must be a tensor with a row for every sample")
    return _fields(tuple(one.detach().clone() for one in batch), names)


def _fields(fields: tuple[Tensor, ...], names: tuple[str, ...]) -> Fields:
    unnamed = len(fields) - len(names)
    return Fields.of(fields[:unnamed], dict(zip(names, fields[unnamed:], strict=True)))
