"""Training: one rank's part in a job whose loop is somebody else's.

    begin (all ranks from the lead's weights) -> step ... step -> end (all ranks with the answer)

It does what core/loop.py does, but is told when. A server rank serves from its `begin` to the workers' end. A pipeline
that streams needs to know when its last mini-batch comes: it is begun again for each row of them, and drained between.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from manyhands.core.agreement import refuse_unlike
from manyhands.core.alike import begin_alike, end_alike, set_free
from manyhands.core.choosing import groups, rule_of
from manyhands.core.errors import Refused, refuse_unless
from manyhands.core.fields import Fields, OwnTask
from manyhands.core.loop import average_buffers
from manyhands.core.meeting import meet
from manyhands.core.protocols import Checks, Divides, Finishes, Rule, Serves, Strategy, Transport
from manyhands.core.worker import Worker
from manyhands.rules.chain import with_step
from manyhands.rules.optimizer import recreate
from manyhands.strategies.pipeline import Pipeline


@runtime_checkable
class Fails(Protocol):
    """A transport that can tell the others why this rank ends."""

    def fail(self, error: BaseException) -> None:
        """Say it; wait for nobody."""


class Training:
    """A worker with its strategy, or a server with the same; what the arguments mean is said at `Hands`."""

    def __init__(
        self,
        transport: Transport,
        model: nn.Module,
        loss: Callable[..., Tensor] | None,
        strategy: Strategy,
        optimizer: torch.optim.Optimizer | None,
        seed: int,
    ) -> None:
        if any(p._post_accumulate_grad_hooks for p in model.parameters()):
            raise Refused("the model has gradient hooks, but must have none: a model can be joined only once at a time")
        self.strategy = copy.deepcopy(strategy)
        if optimizer is not None:
            self.strategy = _with_rule(self.strategy, recreate(optimizer, dict(model.named_parameters())))
        task, rule = OwnTask(model, loss), rule_of(self.strategy)
        self.worker = Worker(transport, task, model, seed=seed, steps=0, batch_size=1, rule=rule)
        self.has_begun = False
        self.replicas = len(self.worker.workers)
        """How many copies of the model the workers hold together."""
        self._divides = isinstance(self.strategy, Divides)
        if isinstance(self.strategy, Divides):
            self.replicas = self.strategy.replicas(self.replicas)
        self.streams = isinstance(self.strategy, Pipeline) and self.strategy.micro_batches is None
        """Whether mini-batches of successive steps are in flight together."""
        self._refuse_misplaced()

    def begin(self, batch_size: int | None, steps: int, data_size: int | None = None) -> None:
        """Set up, once. `steps` mini-batches are announced, to those who must know; sizes may be unknown."""
        w, strategy = self.worker, self.strategy
        if self.has_begun:
            if isinstance(strategy, Pipeline) and self.streams:
                strategy.rest(w)
                w.steps = w.step + steps
                strategy.go_on(w)
            return
        if batch_size is not None:
            self._check(batch_size)
            w.batch_size = batch_size
        w.steps, w.data_size = steps, data_size
        self.has_begun = True
        refuse_unlike(w.transport, w.model, groups(w.rule, w.model))
        begin_alike(w)
        if isinstance(strategy, Serves) and w.transport.role == "server":
            strategy.serve(w)
        else:
            strategy.setup(w)
            meet(w)  # whoever is set up may send, so all must be

    @torch.no_grad()
    def step(self, batch: Fields) -> float | None:
        """Consume one mini-batch; the newest known loss."""
        w = self.worker
        if self.streams and w.step >= w.steps:
            raise Refused(
                f"step {w.step + 1} is one more than was announced, but a pipeline that streams must know when its "
                "last mini-batch comes: take mini-batches from share()"
            )
        if self._divides and (batch.names or len(batch) != 2):
            raise Refused(f"a step has {len(batch)} fields, but in a pipeline must have two, unnamed: input and target")
        if batch.samples != w.batch_size:
            self._check(batch.samples)
        loss = self.strategy.step(w, batch)
        w.step += 1
        return loss

    def end(self) -> bool:
        """Finish, answer, make all ranks alike, leave; whether this rank was the lead."""
        w, strategy = self.worker, self.strategy
        if not self.has_begun:
            self.begin(None, 0)  # others may count on it
        lead, answer = w.workers[0], None
        if w.transport.role == "worker":
            if isinstance(strategy, Finishes):
                strategy.finish(w)
            lead = w.lead
            weights, buffers = strategy.answer(w), average_buffers(w)
            answer = None if weights is None or buffers is None else {**weights, **buffers}
        set_free(w.model)
        led = end_alike(w, lead, answer)
        w.transport.leave()
        return led

    def fail(self, error: BaseException) -> None:
        """End without waiting for anybody; tell the others why, if that is possible."""
        if self.has_begun:
            set_free(self.worker.model)
        if isinstance(self.worker.transport, Fails):
            self.worker.transport.fail(error)

    def _check(self, batch_size: int) -> None:
        w = self.worker
        if isinstance(self.strategy, Checks):
            self.strategy.check(len(w.workers), len(w.servers), batch_size, w.model)

    def _refuse_misplaced(self) -> None:
        """What cannot work on these machines, whatever the data."""
        w = self.worker
        servers, hosts = len(w.servers), len({w.transport.hosts[rank] for rank in w.workers})
        refuse_unless(isinstance(self.strategy, Serves) or not servers, "servers", servers, "0: this method has none")
        fits = hosts == 1 or not self.strategy.one_host
        refuse_unless(fits, "the number of hosts", hosts, "1: the workers of this method share memory")


def _with_rule(strategy: Strategy, rule: Rule) -> Strategy:
    """The same method with another way to make a step; what corrects a gradient before it is part of the method."""
    if not dataclasses.is_dataclass(strategy) or "rule" not in {one.name for one in dataclasses.fields(strategy)}:
        raise Refused(f"a {type(strategy).__name__} has no rule that an optimizer could replace")
    changed: Strategy = dataclasses.replace(strategy, rule=with_step(strategy.rule, rule))
    return changed
