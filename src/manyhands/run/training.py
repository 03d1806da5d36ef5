"""Training: one rank's part in a job whose loop is the user's own.

    begin (all ranks from the lead's model) -> step ... step -> end (all ranks with the answer)

It drives the life cycle of core/rank.py as `mh.train` does, and adds what is special to a user's loop: all ranks start
from the model of the lead and get the answer at the end, batch sizes are checked when they are known, and a rank that
fails says why. A server rank serves from `begin` until the workers have ended.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from manyhands.core.barrier import barrier
from manyhands.core.broadcast import broadcast_answer, broadcast_model, broadcast_start, release_model
from manyhands.core.buffers import note_statistics
from manyhands.core.errors import Refused, refuse_unless
from manyhands.core.fields import Fields, OwnTask, StepLoss
from manyhands.core.flat import is_watched
from manyhands.core.loop_position import LoopPosition
from manyhands.core.loop_worker import LoopWorker
from manyhands.core.model_check import refuse_unlike
from manyhands.core.param_groups import groups, rule_of
from manyhands.core.port import Transport
from manyhands.core.rank import RankRun
from manyhands.core.rule import Rule
from manyhands.core.strategy import Strategy
from manyhands.core.team import release_untrained, team_size
from manyhands.core.worker import Worker
from manyhands.rules.chain import with_step
from manyhands.run.live_optimizers import LiveOptimizers
from manyhands.run.loop_resume import Resume
from manyhands.run.manual_changes import ManualChanges
from manyhands.run.sample_weights import SampleWeights

log = logging.getLogger("manyhands")


@runtime_checkable
class Fails(Protocol):
    """A transport that can tell the other ranks why this one ends."""

    def fail(self, error: BaseException) -> None:
        """Report the error without waiting for any other rank."""


class Training:
    """A worker with its strategy, or a server with the same; the arguments are explained at `Hands`."""

    def __init__(
        self,
        transport: Transport,
        model: nn.Module,
        loss: Callable[..., Tensor] | None,
        strategy: Strategy,
        optimizer: LiveOptimizers | Rule | None,
        seed: int,
        worker: type[Worker] = Worker,
    ) -> None:
        if any(is_watched(p) for p in model.parameters()):
            raise Refused("the model is being trained by other hands, but a model can be joined only once at a time")
        self.strategy = copy.deepcopy(strategy)
        self.live = optimizer if isinstance(optimizer, LiveOptimizers) else None
        rule = optimizer.rule if isinstance(optimizer, LiveOptimizers) else optimizer
        if rule is not None:
            self.strategy = self.strategy.with_rule(partial(with_step, step=rule))
        self.task = OwnTask(model, loss)
        self.worker = worker(
            transport,
            self.task,
            model,
            seed=seed,
            steps=0,
            batch_size=1,
            rule=rule_of(self.strategy),
            team_size=team_size(self.strategy, transport),
        )
        self.run = RankRun(self.worker, self.strategy)
        self.position = LoopPosition(self.worker, self.strategy.traits)
        self.has_begun = self.shows_answer = self._is_united = False
        self.announced = 0
        """How many steps the first `share` has; 0 if it is unknown."""
        self.resume: Resume | None = None
        self.between_steps: Callable[[], None] = lambda: None
        """Called when a step is about to begin."""
        self.gradients_from = "hands.step computes the gradients itself: for a loop with its own backward() use prepare"
        """Why there may be no gradient before the first step."""
        self.replicas = self.strategy.replicas(len(self.worker.workers))
        """How many copies of the model the workers hold together."""
        self._divides = self.replicas < len(self.worker.workers)
        self._refuse_misplaced()

    def begin(self, batch_size: int | None, steps: int, data_size: int | None = None) -> None:
        """Set up, at the first call, for the number of steps that a strategy may plan with; 0 if it is unknown."""
        w = self.worker
        if self.has_begun:
            return
        self.unite(batch_size)
        self.announced = steps
        w.steps, w.data_size = w.step + steps if self.strategy.traits.plans_ahead else 0, data_size
        self.has_begun = True
        broadcast_start(w, "" if self.resume is None else self.resume.name)
        programs = self.strategy.programs()
        if w.transport.role in programs:
            programs[w.transport.role](w)
        else:
            with nullcontext() if self.resume is None else self.resume.keeping_random(w):
                self.run.begin(None if self.resume is None else self.resume.snapshot)
            release_untrained(w)
            barrier(w)  # a worker that is set up may send, so all must be
            self.position.watch()
            self.sample_weights = SampleWeights(w, self.strategy.traits, self.replicas)
            self.changes = ManualChanges(w, self.strategy.traits)
            for remark in self.strategy.remarks(w.steps) if w.rank == w.lead else ():
                log.warning("%s", remark)

    def unite(self, batch_size: int | None = None) -> None:
        """Let all ranks, at the first call, have the lead's model; they may then load a checkpoint before `begin`."""
        w = self.worker
        if batch_size is not None:
            self._check(batch_size)
            w.batch_size = batch_size
        if not self._is_united:
            self._is_united = True
            _refuse_gradients(w.model, self.gradients_from)
            refuse_unlike(w.transport, w.model, groups(w.rule, w.model))
            broadcast_model(w)
            note_statistics(w)

    @torch.no_grad()
    def step(self, batch: Fields) -> StepLoss | None:
        """Consume one mini-batch; the newest known loss. The script's own random numbers are not touched."""
        w = self.worker
        if self._divides and (batch.names or len(batch) != 2):
            raise Refused(f"a step has {len(batch)} fields, but in a pipeline must have two, unnamed: input and target")
        if batch.samples != w.batch_size:
            self._check(batch.samples)
        self.refuse_within_answer("step")
        self.between_steps()
        self.position.at_step()
        self.changes.refuse()
        w.samples_in_step = batch.samples
        w.flat.scale = self.sample_weights.scale(batch.samples)
        self.read_options()
        with own_random_numbers():
            loss = self.run.step(batch)
        self.changes.note()
        return None if loss is None else StepLoss(loss, self.task.take_outputs())

    def read_options(self) -> None:
        """Use the options of the user's optimizer as they are now."""
        if self.live is not None:
            self.worker.options = self.live.read()

    def refuse_within_answer(self, name: str) -> None:
        """Refuse a training step while the model holds the answer."""
        if self.shows_answer:
            raise Refused(f"{name} was called while the model holds the answer, but trains: call it after that block")

    @property
    def is_within_step(self) -> bool:
        """Whether a prepared loop is between a forward pass and the step of its optimizer."""
        return isinstance(self.worker, LoopWorker) and self.worker.in_step

    def refuse_within_step(self, name: str) -> None:
        """Refuse what all workers do between two steps while this one is within a step."""
        if self.is_within_step:
            raise Refused(
                f"{name} was called between a forward pass and optimizer.step(), but must be called between two steps: "
                "after optimizer.step(), and validate under torch.no_grad()"
            )

    def end(self) -> bool:
        """Finish, broadcast the answer to all ranks, leave; whether this rank was the lead."""
        w = self.worker
        if not self.has_begun:
            self.begin(None, 0)  # the other ranks may wait for this one
        answer = None
        if w.transport.role == "worker":
            self.position.at_end()
            self.sample_weights.end()
            outcome = self.run.end()
            if outcome.weights is not None and outcome.buffers is not None:
                answer = {**outcome.weights, **outcome.buffers}
        release_model(w.model)
        led = broadcast_answer(w, self.run.lead, answer)
        w.transport.leave()
        return led

    def fail(self, error: BaseException) -> None:
        """End without waiting for other ranks; report the error to them if the transport can."""
        if self.has_begun:
            release_model(self.worker.model)
        if isinstance(self.worker.transport, Fails):
            self.worker.transport.fail(error)

    def _check(self, batch_size: int) -> None:
        w = self.worker
        self.strategy.check(len(w.workers), len(w.servers), batch_size, w.model)

    def _refuse_misplaced(self) -> None:
        """Refuse a number of servers or hosts that the strategy cannot use."""
        w = self.worker
        servers, hosts = len(w.servers), len({w.transport.hosts[rank] for rank in w.workers})
        refuse_unless(self.strategy.traits.servers or not servers, "servers", servers, "0: this method has none")
        fits = hosts == 1 or not self.strategy.traits.one_host
        refuse_unless(fits, "the number of hosts", hosts, "1: the workers of this method share memory")


def _refuse_gradients(model: nn.Module, why: str) -> None:
    """Refuse gradients that would be dropped; those of `zero_grad(set_to_none=False)` are none."""
    for name, p in model.named_parameters():
        if p.grad is not None and bool(p.grad.any() if not p.grad.is_sparse else p.grad._nnz()):
            raise Refused(f"{name} has a gradient before the first step, but {why}, or call model.zero_grad() before")


@contextmanager
def own_random_numbers() -> Iterator[None]:
    """Within it torch's generator belongs to the model's passes; after it, it is again where the script left it."""
    state = torch.default_generator.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(state)
