"""Pipeline: the model is cut into stages, one per worker; micro-batches stream through them.

split  layers      when  by the schedule        who  the neighbouring stages
what   activations down, errors up              how   any Rule, on the stage's own weights

    F(m)  receive the activation of m (stage 0: the data), compute, send on (last stage: the loss)
    B(m)  receive the error of m (last stage: from the loss), back-propagate, send down
    then  flushing: update once per mini-batch with the mean over its M micro-batches
          streaming: update after every B(m); mini-batches of successive steps are in flight together

A schedule says in which order, `splits/versions` says which weights B(m) sees; this plays any of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from manyhands.core.errors import Refused, refuse_unless
from manyhands.core.gather import gather, need_all
from manyhands.core.holding import replica
from manyhands.core.protocols import At, Batch, Message, Rule, Saved, Tag, Weights, recv
from manyhands.core.saving import join, pieces, restore, section, under
from manyhands.core.stage import Stage
from manyhands.core.worker import Worker
from manyhands.splits.layers import stages
from manyhands.splits.schedules import in_flight
from manyhands.splits.schedules.timeline import Action, Rows
from manyhands.splits.versions import Latest, Stash

ACTIVATION, ERROR = Tag("activation"), Tag("error")


@dataclass
class Pipeline:
    """Layers as stages.

    Args:
        rule: how a stage applies its gradient.
        schedule: gives the rows of actions for K stages and M micro-batches.
        versions: which weights the backward pass sees.
        micro_batches: M, into how many a mini-batch is cut; None: stream whole mini-batches.
    """

    rule: Rule
    schedule: Callable[[int, int], Rows]
    versions: type[Latest] | type[Stash]
    micro_batches: int | None
    lockstep: ClassVar[bool] = True
    one_host: ClassVar[bool] = False

    def __post_init__(self) -> None:
        chunks = 1 if self.micro_batches is None else self.micro_batches
        refuse_unless(chunks >= 1, "micro_batches", self.micro_batches, ">= 1")

    def replicas(self, workers: int) -> int:
        """All workers together hold one model."""
        return 1

    def check(self, workers: int, servers: int, batch_size: int, model: nn.Module) -> None:
        """The model must be cuttable, and so must the mini-batch."""
        stages(model, workers)
        chunks = self.micro_batches or 1
        refuse_unless(batch_size % chunks == 0, "batch_size", batch_size, f"divisible by micro_batches = {chunks}")

    def setup(self, w: Worker) -> None:
        """This rank's stage and its neighbours; its row of the schedule; what is in flight."""
        if w.task.loss is None or w.task.sizes_only:
            raise Refused("a pipeline needs a task with a loss function and real data")
        self.place, self.last = w.workers.index(w.rank), len(w.workers) - 1
        w.trains = stages(w.model, len(w.workers))[self.place]
        self.stage = Stage(w, w.trains)
        self.held = replica(w.flat, self.rule)
        self.stash = self.versions()
        depth = max(in_flight(row) for row in self.schedule(len(w.workers), self.micro_batches or len(w.workers)))
        self.activation, self.error = ACTIVATION._replace(credit=depth + 1), ERROR._replace(credit=depth + 1)
        self.fill(w)
        self.data: dict[int, Batch] = {}
        self.borrowed: dict[int, Message] = {}
        self.losses: dict[int, Tensor] = {}
        self.loss: float | None = None
        w.flat.open()

    def fill(self, w: Worker) -> None:
        """The stage's row of the schedule; streaming: for all mini-batches that are still to come."""
        first, count = (w.step, w.steps - w.step) if self.micro_batches is None else (0, self.micro_batches)
        self.row = [(op, first + m) for op, m in self.schedule(len(w.workers), count)[self.place]]
        self.next_action = 0

    def step(self, w: Worker, batch: Batch) -> float | None:
        """Let one mini-batch in; play what the schedule has up to the next one."""
        if self.micro_batches is None:
            self.data[w.step] = batch
            self.play(w, until=w.step + 1)
        else:
            chunks = [field.chunk(self.micro_batches) for field in batch]
            self.data = {m: tuple(fields) for m, fields in enumerate(zip(*chunks, strict=True))}
            self.next_action = 0
            self.play(w)
            self.update(w, self.micro_batches)
        return self.loss

    def play(self, w: Worker, until: int | None = None) -> None:
        """Carry out actions, as far as the forward pass of micro-batch `until`."""
        while self.next_action < len(self.row) and self.row[self.next_action] != ("F", until):
            self.act(w, self.row[self.next_action])
            self.next_action += 1

    def act(self, w: Worker, action: Action) -> None:
        """One pass of one micro-batch."""
        op, m = action
        if op == "F":
            self.forward(w, m)
            return
        self.backward(w, m)
        w.lag = self.stash.done(m)
        if self.micro_batches is None:
            self.update(w, 1)

    def forward(self, w: Worker, m: int) -> None:
        """F(m): data or activation in, activation or loss out."""
        fields = self.data.pop(m)
        x = fields[0]
        if self.place:
            self.borrowed[m] = recv(w.transport, self.activation.of(m), frm=w.workers[self.place - 1])
            x = self.borrowed[m].tensors[0]
        weights = self.stash.forward(m, self.stage.live)
        loss = w.task.loss
        if self.place < self.last:
            out = self.stage.forward(m, x, weights)
            w.transport.send(w.workers[self.place + 1], self.activation.of(m), (), [out])
        else:
            assert loss is not None
            self.losses[m] = self.stage.forward(m, x, weights, lambda out: loss(out, fields[-1]))
            w.checked(self.losses[m])

    def backward(self, w: Worker, m: int) -> None:
        """B(m): error in, error for the stage below out; the activation goes back to its sender."""
        if self.place == self.last:
            error = self.stage.backward(m, torch.ones_like(self.losses[m]) / (self.micro_batches or 1))
        else:
            message = recv(w.transport, self.error.of(m), frm=w.workers[self.place + 1])
            error = self.stage.backward(m, message.tensors[0])
            message.release()
        if self.place:
            assert error is not None
            self.borrowed.pop(m).release()
            w.transport.send(w.workers[self.place - 1], self.error.of(m), (), [error])

    def update(self, w: Worker, micro_batches: int) -> None:
        """Apply the gradient of the backward passes since the last update."""
        w.flat.close()
        for part, held in zip(w.flat.parts, self.held, strict=True):
            w.move(2 * part.weights.nbytes)
            held.update(part.grad, At(held.weights, samples=w.step * w.batch_size), part.untouched())
        self.stash.updated()
        w.flat.open()
        if self.place == self.last:
            done = [self.losses.pop(m) for m in sorted(self.losses)[:micro_batches]]
            self.loss = float(torch.stack(done).mean())

    def finish(self, w: Worker) -> None:
        """Drain: fewer mini-batches may have come than were announced."""
        self.rest(w)

    def answer(self, w: Worker) -> Weights | None:
        """All stages' weights."""
        names = tuple(place.name for place in w.flat.places)
        gathered = gather(w, names, [w.flat.weights(place.span) for place in w.flat.places])
        if gathered is None:
            return None
        need_all(w, gathered)
        whole: dict[str, Tensor] = dict(w.model.named_parameters())
        for stage_names, tensors in gathered.values():
            for name, x in zip(stage_names, tensors, strict=True):
                whole[name] = x.view(whole[name].shape)
        return {name: x.detach().clone() for name, x in whole.items()}

    # -- checkpoints ------------------------------------------------------------------------------

    def rest(self, w: Worker) -> None:
        """Drain: the backward passes of the mini-batches that were let in. What flushes has never any left."""
        left = self.row[self.next_action :] if self.micro_batches is None else []
        for action in [(op, m) for op, m in left if m < w.step]:
            self.act(w, action)

    def go_on(self, w: Worker) -> None:
        """Fill the pipeline again; what flushes does so with every mini-batch."""
        if self.micro_batches is None:
            self.fill(w)

    def state(self, w: Worker) -> Saved | None:
        """What the rules of all stages remember, by parameter."""
        mine = join(pieces(self.held, w.flat.places))
        gathered = gather(w, tuple(mine), tuple(mine.values()))
        if gathered is None:
            return None
        need_all(w, gathered)
        return under("rule", {n: x for names, xs in gathered.values() for n, x in zip(names, xs, strict=True)})

    def restore(self, w: Worker, saved: Saved) -> None:
        """Of all stages' state what this stage needs, wherever the cuts were."""
        restore(self.held, w.flat.places, section(saved, "rule"))
