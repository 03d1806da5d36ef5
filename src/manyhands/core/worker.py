"""Worker: one rank's hands. It owns the model; models are run here and, stage by stage, in stage.py only.

In virtual time forward and backward run at once and are then *played*: the clock moves by the forward
pass, then by each bucket's share of the backward pass, and after each bucket `fired(bucket)` is called,
so that a method may send it while the rest is still being computed. Among real processes it is called then.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from heapq import merge

import torch
from torch import Tensor, nn

from manyhands.core.choosing import groups
from manyhands.core.errors import Diverged, Refused, refuse_unless, unknown
from manyhands.core.firing import Firing
from manyhands.core.flat import Flat, Span
from manyhands.core.protocols import Batch, Descends, Descent, Rule, Transport
from manyhands.core.spent import Spent
from manyhands.core.task import Task

REFERENCE_FLOPS = 50e9
"""Floating-point operations per second of a core of speed 1."""
REFERENCE_BYTES = 8e9
"""Bytes per second that such a core copies, adds or encodes."""
FORWARD_SHARE = 1 / 3
"""Of the work of a training step; the backward pass is twice the forward pass."""

Layouts = dict[tuple[tuple[str, ...], tuple[tuple[str, ...], ...]], Flat]
"""By the names of the parameters, and of those that lie apart."""


class Worker:
    """A rank with a model.

    Args:
        transport: this rank's way to the others.
        task: what is to be learned.
        model: this rank's own copy of the model.
        seed: of the job.
        steps: the job's budget in updates, for methods that plan ahead.
        batch_size: samples of one mini-batch.
        data_size: samples of the whole data set; None if nobody knows.
        rule: what moves the weights: parameters that it treats differently lie apart.
        layouts: where workers of one process that have the same model of sizes only share how it is laid out.
    """

    def __init__(
        self,
        transport: Transport,
        task: Task,
        model: nn.Module,
        *,
        seed: int,
        steps: int,
        batch_size: int,
        data_size: int | None = None,
        rule: Rule | None = None,
        layouts: Layouts | None = None,
    ) -> None:
        self.transport = transport
        self.task = task
        self.model = model
        self.seed = seed
        self.steps = steps
        self.batch_size = batch_size
        self.data_size = data_size
        self.rule = rule
        self._layouts: Layouts = {} if layouts is None else layouts
        self.rank = transport.rank
        seats = transport.roles.count("worker")
        self.seats: Sequence[int] = range(seats)
        """All ranks that are workers, or may become one."""
        self.workers: Sequence[int] = range(seats - len(transport.late))
        """Those that begin together."""
        self.crew: Sequence[int] = self.workers
        """Those that gather: whoever comes later is among them from the end of the stretch in which it came."""
        self.servers: Sequence[int] = range(seats, transport.size)
        self.trains: nn.Module = model
        """The part of the model that this rank trains; a pipeline makes it smaller."""
        self.apart: Collection[str] = ()
        """Parameters of it that a method looks after by other means: they are not in `flat`."""
        self.step = self.came_at = 0
        self.lag = 0
        self.gatherings = 0
        self.spent = Spent(transport)
        self.random = random.Random(f"{seed}/{self.rank}")

    @cached_property
    def flat(self) -> Flat:
        """The parameters this rank trains, laid out flat; refused if they hold no finite numbers."""
        mine = {id(p) for p in self.trains.parameters()}
        named = {name: p for name, p in self.model.named_parameters() if id(p) in mine}
        for name, p in named.items():
            if not p.is_meta and not bool((p.isfinite() if p.requires_grad else ~p.isnan()).all()):
                raise Refused(f"{name} holds NaN or infinity before the first step, but must be finite")
        trains = any(p.requires_grad for p in self.model.parameters())
        refuse_unless(trains, "the number of parameters to be trained", 0, ">= 1: all are frozen")
        here = {name: p for name, p in named.items() if name not in self.apart}
        apart = tuple(tuple(names) for names in groups(self.rule, self.model))
        key = tuple(here), apart
        if key not in self._layouts:
            self._layouts[key] = Flat(here, apart)
        return self._layouts[key]

    @cached_property
    def _parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    @property
    def lead(self) -> int:
        """The lowest worker rank still there: it evaluates and saves."""
        in_order = merge([self.rank], self.transport.peers("worker"))
        return next(rank for rank in in_order if rank in self.crew)

    @property
    def samples(self) -> int:
        """About how many samples the job has consumed, seen from this rank."""
        return self.step * self.batch_size * len(self.workers)

    # -- computing --------------------------------------------------------------------------------

    def gradient(
        self, batch: Batch, fired: Callable[[Span], None] | None = None, origin: tuple[int, int, int] | None = None
    ) -> float:
        """The loss of a mini-batch; its gradient is in the flat gradient afterwards.

        What is random in it depends on this rank and step, or on an `origin` that names another rank, step and key.
        """
        self.seed_torch(*(origin or (self.rank, self.step)))
        live = fired if not self.transport.plays else None
        with self.spent.computing():
            loss = math.nan if self.task.sizes_only else self._run(batch, live)
            if self.transport.plays:
                self._play(self.seconds(len(batch[0]) if batch else self.batch_size), fired)
        return loss

    def _play(self, seconds: float, fired: Callable[[Span], None] | None) -> None:
        """Let the time of both passes go by."""
        if fired is None:
            self.transport.spend(seconds)
            return
        self.transport.spend(seconds * FORWARD_SHARE)
        numel = self.flat.numel
        for bucket in self.flat.buckets():
            self.transport.spend(seconds * (1 - FORWARD_SHARE) * bucket.numel / numel)
            fired(bucket)

    @cached_property
    def descends(self) -> Descends | None:
        """The model, if it can go down this task's loss by itself."""
        if self.task.sizes_only or self.task.gradient is not None or not isinstance(self.model, Descends):
            return None
        return self.model if self.model.can_descend(self.task.loss) else None

    def descent(self, batch: Batch) -> tuple[float, Descent]:
        """The loss of a mini-batch and the step that follows from it, by a model that descends."""
        assert self.descends is not None
        self.seed_torch(self.rank, self.step)
        with self.spent.computing():
            step = self.descends.descend(*batch)
            loss = self.checked(step.loss)
            if self.transport.plays:
                self.transport.spend(self.seconds(len(batch[0])))
        return loss, step

    def _run(self, batch: Batch, fired: Callable[[Span], None] | None) -> float:
        firing = Firing(self.flat.buckets(), self.flat.places, fired) if fired else None
        self.flat.open(None if firing is None else firing.arrived)
        value = self._differentiate(batch) if self.task.gradient is None else self._take_gradient(batch)
        self.flat.close()
        if firing is not None:
            firing.finish()
        return value

    def _differentiate(self, batch: Batch) -> float:
        with torch.enable_grad():
            loss = self.task.loss_of(self.model, batch)
            value = self.checked(loss)
            loss.backward()  # type: ignore[no-untyped-call]
        return value

    @torch.no_grad()
    def _take_gradient(self, batch: Batch) -> float:
        """From a task that knows its gradient without a backward pass."""
        assert self.task.gradient is not None
        loss, gradients = self.task.gradient(self.model, *batch)
        value = self.checked(loss)
        known = {place.name: place for place in self.flat.places}
        for name, gradient in gradients.items():
            if name not in known:
                raise unknown("parameter", name, list(known))
            self.flat.put(known[name], gradient)
        return value

    def seed_torch(self, rank: int, step: int, key: int = 0) -> None:
        """Make dropout and the like depend on (seed, rank, step) only, in every world and after a resume."""
        torch.default_generator.manual_seed(hash((self.seed, rank, step, key)) % 2**63)

    @contextmanager
    def waiting_in_forward(self) -> Iterator[None]:
        """Wait for others while the model runs: in virtual time they seed the same generator meanwhile."""
        state = torch.default_generator.get_state()
        try:
            yield
        finally:
            torch.default_generator.set_state(state)

    def checked(self, loss: Tensor) -> float:
        """The loss as a number, if it is one."""
        value = float(loss.detach())
        if not math.isfinite(value):
            raise Diverged(self.rank, self.step, value)
        return value

    def seconds(self, samples: int, parameters: int | None = None) -> float:
        """How long a core of speed 1 computes forward and backward for these samples (or a part of the model)."""
        work = self.task.work or 6 * self._parameters
        return samples * work * (1 if parameters is None else parameters / self._parameters) / REFERENCE_FLOPS

    def move(self, nbytes: int) -> None:
        """Account for bytes that were copied, added or encoded."""
        self.transport.spend(nbytes / REFERENCE_BYTES, moving=True)

    def named(self, weights: Sequence[Tensor] | None = None) -> dict[str, Tensor]:
        """The whole model's parameters by name: trained ones from `weights` (one tensor per part) if given."""
        trained: Mapping[str, Tensor] = self.flat.named()
        if weights is not None:
            trained = {p.name: weights[p.span.part][p.span.start : p.span.stop].view(p.shape) for p in self.flat.places}
        return {name: trained.get(name, p).detach().clone() for name, p in self.model.named_parameters()}
