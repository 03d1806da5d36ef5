"""Pipeline: the model is divided into stages, one per worker; micro-batches pass through them.

split  layers      when  by the schedule        who  the neighbouring stages
what   activations forward, errors backward     how   any Rule, on the stage's own weights

    F(m)  receive the activation of m (stage 0: the data), compute, send it to the next stage (last stage: the loss)
    B(m)  receive the error of m (last stage: from the loss), back-propagate, send it to the previous stage,
          with the loss of m, so that every stage knows it
    then  flushing: update once per mini-batch with the mean over its M micro-batches
          streaming: update after every B(m); mini-batches of successive steps are in flight together

The schedule determines the order of these actions, `splits/versions` the weights that B(m) uses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from manyhands.core.declared_state import RuleState, StateParts
from manyhands.core.errors import Refused, refuse_unless
from manyhands.core.gather import gather, need_all
from manyhands.core.port import Message, Tag, recv
from manyhands.core.rule import Rule, UpdateContext
from manyhands.core.stage import Stage
from manyhands.core.strategy import Batch, Strategy, Traits, Weights
from manyhands.core.weight_slice import replica_slices
from manyhands.core.worker import Worker
from manyhands.splits.layers import stages
from manyhands.splits.schedules import in_flight
from manyhands.splits.schedules.timeline import Action, Rows
from manyhands.splits.versions import Latest, Stash

ACTIVATION, ERROR = Tag("activation"), Tag("error")


@dataclass
class Pipeline(Strategy):
    """Training with the layers divided into stages.

    Args:
        rule: how a stage applies its gradient.
        schedule: makes the rows of actions for K stages and M micro-batches.
        versions: which weights the backward pass uses.
        micro_batches: M, the number that a mini-batch is divided into; None: stream whole mini-batches.
    """

    rule: Rule
    schedule: Callable[[int, int], Rows]
    versions: type[Latest] | type[Stash]
    micro_batches: int | None

    @property
    def traits(self) -> Traits:
        divided = "a worker has only a stage of the model, and no whole loss or gradient"
        streams = self.micro_batches is None
        return Traits(lockstep=True, on_worker_loss="ends", streams=streams, plans_ahead=streams, needs_step=divided)

    def __post_init__(self) -> None:
        chunks = 1 if self.micro_batches is None else self.micro_batches
        refuse_unless(chunks >= 1, "micro_batches", self.micro_batches, ">= 1")

    def replicas(self, workers: int) -> int:
        """All workers together hold one model."""
        return 1

    def check(self, workers: int, servers: int, batch_size: int, model: nn.Module) -> None:
        """The model must have a layer for each stage, and the mini-batch must be divisible."""
        stages(model, workers)
        chunks = self.micro_batches or 1
        refuse_unless(batch_size % chunks == 0, "batch_size", batch_size, f"divisible by micro_batches = {chunks}")

    def setup(self, w: Worker) -> None:
        """This rank's stage and its index; its row of the schedule; what is in flight, by micro-batch."""
        if w.task.loss is None or w.task.sizes_only:
            raise Refused("a pipeline needs a task with a loss function and real data")
        self.stage_index, self.last = w.workers.index(w.rank), len(w.workers) - 1
        module = stages(w.model, len(w.workers))[self.stage_index]
        w.lay_out(module)
        self.stage = Stage(w, module)
        self.slices = replica_slices(w.ops, w.flat, self.rule)
        self.stash = self.versions()
        depth = max(in_flight(row) for row in self.schedule(len(w.workers), self.micro_batches or len(w.workers)))
        self.activation, self.error = ACTIVATION._replace(credit=depth + 1), ERROR._replace(credit=depth + 1)
        self._load_row(w)
        self.data: dict[int, Batch] = {}
        self.borrowed: dict[int, Message] = {}
        self.losses: dict[int, Tensor] = {}
        self.loss: float | None = None
        w.flat.open(by_hooks=False)

    def _load_row(self, w: Worker) -> None:
        """Make the stage's row of the schedule; streaming: for all mini-batches that are left."""
        first, count = (w.step, w.steps - w.step) if self.micro_batches is None else (0, self.micro_batches)
        self.row = [(op, first + m) for op, m in self.schedule(len(w.workers), count)[self.stage_index]]
        self.next_action = 0

    def step(self, w: Worker, batch: Batch) -> float | None:
        """Take in one mini-batch; run the actions of the schedule up to the forward pass of the next one."""
        if self.micro_batches is None:
            self.data[w.step] = batch
            self._run_actions(w, until=w.step + 1)
        else:
            chunks = [field.chunk(self.micro_batches) for field in batch]
            self.data = {m: tuple(fields) for m, fields in enumerate(zip(*chunks, strict=True))}
            self.next_action = 0
            self._run_actions(w)
            self._update(w, self.micro_batches)
        return self.loss

    def _run_actions(self, w: Worker, until: int | None = None) -> None:
        """Run actions up to the forward pass of micro-batch `until`, or all."""
        while self.next_action < len(self.row) and self.row[self.next_action] != ("F", until):
            self._act(w, self.row[self.next_action])
            self.next_action += 1

    def _act(self, w: Worker, action: Action) -> None:
        """One pass of one micro-batch; streaming: with the update that follows a backward pass."""
        op, m = action
        if op == "F":
            self._forward(w, m)
            return
        self._backward(w, m)
        w.lag = self.stash.done(m)
        if self.micro_batches is None:
            self._update(w, 1)

    def _forward(self, w: Worker, m: int) -> None:
        """F(m): from the data or an activation to an activation or the loss."""
        fields = self.data.pop(m)
        x = fields[0]
        if self.stage_index:
            self.borrowed[m] = recv(w.transport, self.activation.of(m), frm=w.workers[self.stage_index - 1])
            x = self.borrowed[m].tensors[0]
        weights = self.stash.forward(m, self.stage.live, w.ops)
        loss = w.task.loss
        if self.stage_index < self.last:
            out = self.stage.forward(m, x, weights)
            w.transport.send(w.workers[self.stage_index + 1], self.activation.of(m), (), [out])
        else:
            assert loss is not None
            self.losses[m] = self.stage.forward(m, x, weights, lambda out: loss(out, fields[-1]))
            w.checked(self.losses[m])

    def _backward(self, w: Worker, m: int) -> None:
        """B(m): from the error of the next stage to that of the previous one; releases the activation of m."""
        if self.stage_index == self.last:
            error = self.stage.backward(m, torch.ones_like(self.losses[m]) / (self.micro_batches or 1))
        else:
            message = recv(w.transport, self.error.of(m), frm=w.workers[self.stage_index + 1])
            error = self.stage.backward(m, message.tensors[0])
            self.losses[m] = torch.tensor(message.meta[0], dtype=message.tensors[0].dtype)
            message.release()
        if self.stage_index:
            assert error is not None
            self.borrowed.pop(m).release()
            w.transport.send(w.workers[self.stage_index - 1], self.error.of(m), (float(self.losses[m]),), [error])

    def _update(self, w: Worker, micro_batches: int) -> None:
        """Apply the gradient accumulated in the backward passes since the last update."""
        w.flat.close()
        for group, weight_slice in zip(w.flat.groups, self.slices, strict=True):
            weight_slice.update(
                group.grad, UpdateContext(weight_slice.weights, samples=w.step * w.batch_size), group.untouched()
            )
        self.stash.updated()
        w.flat.open(by_hooks=False)
        losses = [self.losses.pop(m) for m in sorted(self.losses)[:micro_batches]]
        self.loss = float(torch.stack(losses).mean())

    def finish(self, w: Worker) -> None:
        """Drain: the run may end before all announced mini-batches."""
        self.quiesce(w)

    def answer(self, w: Worker) -> Weights | None:
        """The weights of all stages, gathered by name."""
        names = tuple(slot.name for slot in w.flat.slots)
        gathered = gather(w, names, [w.flat.weights(slot.span) for slot in w.flat.slots])
        if gathered is None:
            return None
        need_all(w, gathered)
        whole: dict[str, Tensor] = dict(w.model.named_parameters())
        for stage_names, tensors in gathered.values():
            for name, x in zip(stage_names, tensors, strict=True):
                whole[name] = x.view(whole[name].shape)
        return {name: x.detach().clone() for name, x in whole.items()}

    # -- checkpoints ------------------------------------------------------------------------------

    def quiesce(self, w: Worker) -> None:
        """Drain: run the backward passes of the mini-batches taken in. A pipeline that flushes has none left."""
        remaining = self.row[self.next_action :] if self.micro_batches is None else []
        for action in [(op, m) for op, m in remaining if m < w.step]:
            self._act(w, action)

    def resume(self, w: Worker) -> None:
        """Fill the pipeline again; one that flushes does so with every mini-batch."""
        if self.micro_batches is None:
            self._load_row(w)

    def declared_state(self, w: Worker) -> StateParts:
        """The state of the rule, divided over the stages; a resumed run may be divided into other stages."""
        return {"rule": RuleState(w.flat.slots, self.slices, "divided")}
