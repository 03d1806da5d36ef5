"""Sandblaster: L-BFGS on large batches, in small portions, with vectors that no rank holds whole.

split  data, in portions    when  every batch, in lock step     who  a coordinator, vector servers
what   raw gradients; samples of portions that others compute   how   L-BFGS with a line search

    worker         send mini-batches;  after the last of a batch, wait until the weights have moved
    replica        fetch w + t d, once per pass;  g = gradient of a portion;  push it to every server    (this file)
    coordinator    cut the batch, assign portions, copy the late ones, search along d          (coordinator.py)
    vector server  its shard of w, d, g and of the history;  sums of portions in their order   (vector_server.py)

Every worker is a replica too, in an activity beside its main program, so that a late portion delays no other. Sums are
in the order of portions: which replica computed which, and how often, changes no bit of the result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from manyhands.core.declared_state import CustomState, StateParts
from manyhands.core.errors import Diverged, Refused, refuse_unless
from manyhands.core.fields import Fields
from manyhands.core.gather import gather
from manyhands.core.port import Message, recv
from manyhands.core.strategy import Batch, Saved, Strategy, Traits, Weights
from manyhands.core.worker import Worker
from manyhands.rules.lbfgs import Pair
from manyhands.rules.wolfe import LineSearch, strong_wolfe
from manyhands.servers import check_servers
from manyhands.strategies.sandblaster.coordinator import (
    END,
    FREE,
    IDLE,
    IMPROVED,
    MINI_BATCH,
    NO_MORE,
    ORDER,
    QUIESCE_NOW,
    Coordinator,
    Knobs,
)
from manyhands.strategies.sandblaster.sharded_vectors import ShardedVectors, vector_spans
from manyhands.strategies.sandblaster.vector_server import VectorServer


@dataclass
class Sandblaster(Strategy):
    """Distributed L-BFGS.

    Args:
        lr: the step that a line search begins with.
        history: m, how many pairs of steps and gradient differences are stored.
        portion: how many samples make a portion.
        batches: mini-batches of every worker that make one batch.
        iterations: steps of L-BFGS on one batch.
        search: finds the step length along a direction.
    """

    lr: float = 1.0
    history: int = 10
    portion: int = 32
    batches: int = 4
    iterations: int = 3
    search: LineSearch = field(default=strong_wolfe, repr=False)

    @property
    def traits(self) -> Traits:
        several = "a line search computes the loss at several points in one step"
        return Traits(
            lockstep=True,
            on_worker_loss="continues",
            servers=True,
            may_end_early=True,
            needs_step=several,
            needs_whole_model="its dot products and its line search are over all weights",
            lag="always 0",
            lag_counts="the weights do not change until all gradients at them are summed",
        )

    def __post_init__(self) -> None:
        refuse_unless(0 < self.lr < math.inf, "lr", self.lr, "> 0 and finite")
        refuse_unless(self.history >= 0, "history", self.history, ">= 0")
        for name in ("portion", "batches", "iterations"):
            refuse_unless(getattr(self, name) >= 1, name, getattr(self, name), ">= 1")

    def check(self, workers: int, servers: int, batch_size: int, model: nn.Module) -> None:
        """Every server needs some parameters."""
        check_servers(servers, model)

    def setup(self, w: Worker) -> None:
        """The client of the vector servers; this worker's mini-batches of the batch; the activities of this rank."""
        if w.task.sizes_only:
            raise Refused("a line search needs a task with real data: sizes only have no loss")
        spans = vector_spans(w)
        self.sharded = ShardedVectors(w, spans)
        self.lead = w.workers[0]
        self.own: dict[int, Fields] = {}
        self.loss: float | None = None
        self.loaded_pass = 0
        self.ended = False
        if w.rank in spans:
            w.transport.spawn(VectorServer(w, self.lead, spans).serve)
        if w.rank == self.lead:
            knobs = Knobs(self.lr, self.history, self.portion, self.batches, self.iterations, self.search)
            self.coordinator = Coordinator(w, ShardedVectors(w, spans), knobs)
            w.transport.spawn(self.coordinator.run)
        self.replica = w.transport.spawn(lambda: self._compute(w))

    def serve(self, w: Worker) -> None:
        """Hold a shard of all vectors."""
        VectorServer(w, w.workers[0], vector_spans(w)).serve()

    def step(self, w: Worker, batch: Batch) -> float | None:
        """Send a mini-batch. If it completes a batch, wait until the weights have moved."""
        if len(self.own) == self.batches:
            self.own = {}
        mine = self.own[w.step] = _copy(batch)
        w.transport.send(self.lead, MINI_BATCH, (w.step, mine.names), mine)
        if len(self.own) == self.batches:
            (self.loss,) = recv(w.transport, IMPROVED, frm=self.lead).meta
        return self.loss

    # -- the replica, an activity -----------------------------------------------------------------

    def _compute(self, w: Worker) -> None:
        """Compute the portions that the coordinator assigns, until END."""
        while True:
            order = recv(w.transport, ORDER, END, frm=self.lead)
            if order.tag == END:
                return
            number, portion, owner, step, start, stop, names = order.meta
            batch = self._samples(order, step, start, stop, names)
            loss = math.nan
            if batch is not None and self._fetch(number):
                loss = self._push(w, number, portion, batch, (owner, step, start))
            w.transport.send(self.lead, FREE, (number, portion, loss))

    def _samples(self, order: Message, step: int, start: int, stop: int, names: tuple[str, ...]) -> Fields | None:
        """The samples of an order, or some of this worker's own; None if these are of a batch that is over."""
        if order.tensors:
            fields = order.keep()
        elif (mine := self.own.get(step)) is not None:
            fields = tuple(one[start:stop] for one in mine)
        else:
            return None
        return _fields(fields, names)

    def _fetch(self, number: int) -> bool:
        """Load the weights of a pass, unless they are loaded; False if it is over."""
        if self.loaded_pass != number:
            self.loaded_pass = number if self.sharded.fetch(number) else 0
        return self.loaded_pass == number

    def _push(self, w: Worker, number: int, portion: int, batch: Fields, origin: tuple[int, int, int]) -> float:
        """Push the sum of the gradients of some samples to all servers; zeros if the loss is not finite."""
        samples = len(batch[0])
        try:
            loss = w.gradient(batch, origin=origin) * samples
            gradients = [w.ops.scaled(group.grad, samples) for group in w.flat.groups]
        except Diverged as diverged:
            loss, gradients = diverged.loss, [torch.zeros_like(group.grad) for group in w.flat.groups]
        self.sharded.push(number, portion, gradients)
        return loss

    # -- the end ----------------------------------------------------------------------------------

    def finish(self, w: Worker) -> None:
        """Send no more mini-batches; compute portions until the coordinator ends."""
        w.transport.send(self.lead, NO_MORE)
        self.replica.join()
        self.ended = True

    def answer(self, w: Worker) -> Weights | None:
        """The weights on the vector servers."""
        if gather(w) is None:
            return None
        if w.rank != self.lead:
            recv(w.transport, IMPROVED, frm=self.lead)  # raises the loss of the coordinator
        return w.named(self.sharded.read(last=self.ended))

    # -- checkpoints ------------------------------------------------------------------------------

    def quiesce(self, w: Worker) -> None:
        """Use the mini-batches of an incomplete batch, and wait until no replica computes."""
        w.transport.send(self.lead, QUIESCE_NOW)
        recv(w.transport, IDLE, frm=self.lead)
        self.own = {}

    def resume(self, w: Worker) -> None:
        """A new batch begins with the next mini-batch."""

    def declared_state(self, w: Worker) -> StateParts:
        """The history of L-BFGS, numbers and vectors, and how many steps the weights have taken: all on the lead."""
        return {
            "pairs": CustomState("lead", self._pairs, self._load_pairs),
            "history": CustomState("lead", lambda: self.sharded.save(self._in_history()), self._load_vectors),
            "moves": CustomState("lead", lambda: {"": torch.tensor(self.coordinator.moves)}, self._load_moves),
        }

    def _in_history(self) -> list[str]:
        """The names of the vectors on the servers."""
        return [name for pair in self.coordinator.history.pairs for name in (pair.s, pair.y)]

    def _pairs(self) -> Saved:
        pairs = self.coordinator.history.pairs
        return {"": torch.tensor(pairs, dtype=torch.float64).reshape(len(pairs), 3)}

    def _load_pairs(self, saved: Sequence[Saved]) -> None:
        """Of a longer history the newest pairs are kept."""
        pairs = [Pair(int(number), sy, yy) for number, sy, yy in saved[0][""].tolist()]
        self.coordinator.history.restore(pairs[max(0, len(pairs) - self.history) :])

    def _load_vectors(self, saved: Sequence[Saved]) -> None:
        kept = self._in_history()
        self.sharded.restore({name: x for name, x in saved[0].items() if name.rpartition("/")[2] in kept})

    def _load_moves(self, saved: Sequence[Saved]) -> None:
        self.coordinator.moves = int(saved[0][""])


def _copy(batch: Batch) -> Fields:
    """A copy of a mini-batch, because its memory may be reused. Portions of it are sent, so it must have rows."""
    names = batch.names if isinstance(batch, Fields) else ()
    for number, one in enumerate(batch):
        if not isinstance(one, Tensor) or not one.dim() or len(one) != len(batch[0]):
            what = f"a tensor of shape {tuple(one.shape)}" if isinstance(one, Tensor) else f"a {type(one).__name__}"
            raise Refused(f"field {number} of a step is {what}, but must be a tensor with a row for every sample")
    return _fields(tuple(one.detach().clone() for one in batch), names)


def _fields(fields: tuple[Tensor, ...], names: tuple[str, ...]) -> Fields:
    unnamed = len(fields) - len(names)
    return Fields.of(fields[:unnamed], dict(zip(names, fields[unnamed:], strict=True)))
