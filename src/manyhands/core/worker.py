"""Worker: what a strategy sees of its own rank. It owns the model; only here and in stage.py is a model run.

In virtual time the forward and the backward pass are computed at once, and their duration is charged afterwards: first
that of the forward pass, then each bucket's share of the backward pass, both by their operations (core/work.py). After
each bucket `fired(bucket)` is called, so that a strategy can send it while the rest is still being computed. In real
processes `fired` is called as soon as the gradients of a bucket are complete.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from heapq import merge
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn

from manyhands.core.buckets import ReadyBuckets
from manyhands.core.errors import Diverged, Refused, refuse_unless, unknown
from manyhands.core.flat import Flat, Span
from manyhands.core.lag import UNKNOWN_LAG
from manyhands.core.model_check import refuse_uninitialised
from manyhands.core.param_groups import groups
from manyhands.core.pass_thread import PassThread
from manyhands.core.port import REFERENCE_FLOPS, Transport
from manyhands.core.rule import Rule
from manyhands.core.running_statistics import RunningStatistic
from manyhands.core.step_timer import StepTimer
from manyhands.core.strategy import Batch
from manyhands.core.task import Task
from manyhands.core.vector_ops import vector_ops
from manyhands.core.work import Work, share_of, work_of
from manyhands.core.work_counter import example

if TYPE_CHECKING:
    from manyhands.core.team import Team

Result = TypeVar("Result")
Layouts = dict[tuple[tuple[str, ...], tuple[tuple[str, ...], ...]], Flat]
"""Flat models by the names of their parameters and of the parameter groups."""


class Worker:
    """A rank with its model, its place among the ranks and its progress.

    Args:
        transport: connects this rank with the others.
        task: the model, its data and its loss.
        model: this rank's own copy of the model.
        seed: the seed of the job.
        steps: the job's budget in updates, for strategies that plan ahead.
        batch_size: samples per mini-batch.
        data_size: samples in the whole data set; None if unknown.
        rule: the update rule; the flat model keeps the parameter groups that it treats differently apart.
        team_size: how many consecutive ranks hold one replica of the model together.
        layouts: a cache that workers of one process share if they have the same model of sizes only.
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
        team_size: int = 1,
        layouts: Layouts | None = None,
    ) -> None:
        refuse_uninitialised(model)
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
        self.team_size = team_size
        self.team: Team | None = None
        """Computes the gradient together with other ranks; None: this rank computes it alone."""
        ranks = transport.roles.count("worker")
        self.pass_thread: PassThread | None = None
        """Runs the passes, if ranks wait for one another inside; None: they run in the rank's own line of control."""
        self.worker_ranks: Sequence[int] = range(ranks)
        """All worker ranks, including those that may join later."""
        self.workers: Sequence[int] = range(ranks - len(transport.pending_ranks))
        """The workers that begin together."""
        self.members: Sequence[int] = self.workers
        """The workers that take part in `gather`: a worker that joins is added at the end of its first segment."""
        self.servers: Sequence[int] = range(ranks, transport.size)
        self.trained: nn.Module = model
        """The module whose parameters are in `flat`: the whole model, or a part chosen by `lay_out`."""
        self.statistics: Mapping[str, RunningStatistic] = {}
        """The running statistics of the model, as they were when the run began."""
        self.step = self.joined_at = 0
        self.lag = UNKNOWN_LAG
        """How stale the gradients were whose outcome has become known in this step; a strategy sets it."""
        self.activations: int | None = None
        """The most bytes of activations that this rank keeps at one time; None: not measured."""
        self.versions: int | None = None
        """The most versions of its weights that this rank keeps at one time; None: its method keeps only one."""
        self.version_bytes: int | None = None
        """The most bytes of weights that it keeps beside the live ones; None: not measured."""
        self.samples_in_step = 0
        """How many samples the step under way has in a user's own loop; 0: a mini-batch of the usual size."""
        self.options: tuple[float, ...] = ()
        """The numbers of the user's optimizer in this step, for the ranks that apply its gradient."""
        self.gather_round = 0
        self.timer = StepTimer(transport)
        self.ops = vector_ops(transport)
        """Operations on vectors like the weights, whose time is charged if it is simulated."""
        self.random = random.Random(f"{seed}/{self.replica}")
        self.work = work_of(model) if transport.is_simulated else None
        """What virtual seconds follow; None in real processes, whose passes take their own time."""

    @property
    def replica(self) -> int:
        """The number of the replica of the model that this rank holds, alone or as a part of it."""
        return self.replica_of(self.rank)

    def replica_of(self, rank: int) -> int:
        return rank // self.team_size

    @cached_property
    def flat(self) -> Flat:
        """The parameters this rank trains, as flat tensors: the whole model, unless `lay_out` chose before."""
        return self._flatten(())

    def lay_out(self, module: nn.Module | None = None, exclude: Collection[str] = ()) -> None:
        """Choose what `flat` contains: the parameters of `module`, or of `trained`, without those in `exclude`.

        Called at most once, in `setup`, before `flat` is used for the first time; refused afterwards.
        """
        if "flat" in vars(self):
            raise Refused("lay_out was called after flat had been used, but must be called before, and only once")
        self.trained = self.trained if module is None else module
        self.flat = self._flatten(exclude)

    def _flatten(self, exclude: Collection[str]) -> Flat:
        """Refuse parameters that are not finite, and a model without any to train; lay out the others."""
        trained = {id(p) for p in self.trained.parameters()}
        named = {name: p for name, p in self.model.named_parameters() if id(p) in trained}
        for name, p in named.items():
            if not p.is_meta and not bool((p.isfinite() if p.requires_grad else ~p.isnan()).all()):
                raise Refused(f"{name} holds NaN or infinity before the first step, but must be finite")
        has_trainable = any(p.requires_grad for p in self.model.parameters())
        refuse_unless(has_trainable, "the number of parameters to be trained", 0, ">= 1: all are frozen")
        included = {name: p for name, p in named.items() if name not in exclude}
        param_groups = tuple(tuple(names) for names in groups(self.rule, self.model))
        key = tuple(included), param_groups
        if key not in self._layouts:
            self._layouts[key] = Flat(included, param_groups)
        return self._layouts[key]

    @property
    def lead(self) -> int:
        """The lowest living worker rank: it evaluates and saves."""
        in_order = merge([self.rank], self.transport.peers("worker"))
        return next(rank for rank in in_order if rank in self.members)

    @property
    def samples(self) -> int:
        """How many samples the job has consumed before this step, estimated from this rank's own steps."""
        return self.samples_before(self.step)

    def samples_before(self, step: int) -> int:
        """The same before a step of this number, from 0."""
        return step * self.batch_size * len(self.workers)

    # -- computing --------------------------------------------------------------------------------

    def gradient(
        self, batch: Batch, fired: Callable[[Span], None] | None = None, origin: tuple[int, int, int] | None = None
    ) -> float:
        """Compute the loss of a mini-batch, which is returned, and its gradient, which is left in `flat`.

        Randomness (dropout) depends on this rank and step, or on `origin`: another rank, step and key.
        """
        if self.team is not None:
            loss = self.team.gradient(self, batch, origin or (self.rank, self.step, 0))
            for bucket in self.flat.buckets() if fired is not None else ():
                fired(bucket)  # type: ignore[misc]
            return loss
        return self.own_gradient(batch, fired, origin)

    def own_gradient(
        self, batch: Batch, fired: Callable[[Span], None] | None = None, origin: tuple[int, int, int] | None = None
    ) -> float:
        """The same by this rank, which runs the whole model itself."""
        self.seed_torch(*(origin or (self.rank, self.step)))
        live = fired if not self.transport.is_simulated else None
        with self.timer.computing():
            loss = math.nan if self.task.sizes_only else self._run(batch, live)
            samples = len(batch[0]) if batch else self.batch_size
            if fired is None or live is not None:
                self.charge_passes(samples)
            else:
                self._charge_buckets(samples, fired)
        return loss

    def charge_passes(self, samples: int, share: float = 1.0) -> None:
        """Charge the time of a forward and a backward pass, or a share of it; real passes have taken theirs already."""
        if self.work is not None:
            self.transport.charge_compute(samples * self.work.total * share / REFERENCE_FLOPS)

    def _charge_buckets(self, samples: int, fired: Callable[[Span], None]) -> None:
        """Charge the time of both passes, and fire each bucket when its share of the backward pass is over."""
        forward, backward = self._pass_shares
        self.charge_passes(samples, forward)
        for bucket, share in zip(self.flat.buckets(), backward, strict=True):
            self.charge_passes(samples, share)
            fired(bucket)

    @cached_property
    def _pass_shares(self) -> tuple[float, list[float]]:
        """What the forward pass, and the backward pass of each bucket, have of the work of both passes."""
        assert self.work is not None
        whole = self.work.share()
        sizes = {slot.name: slot.span.numel for slot in self.flat.slots}
        shares = self.work.backward_shares(sizes)
        inside = [[slot.name for slot in self.flat.slots if bucket.holds(slot.span)] for bucket in self.flat.buckets()]
        return whole.forward, [whole.backward * sum(shares[name] for name in names) for names in inside]

    def share_of(self, module: nn.Module) -> Work:
        """What a part of the model has of the work of both passes; nothing in real processes."""
        return Work() if self.work is None else share_of(self.model, module)

    def _run(self, batch: Batch, fired: Callable[[Span], None] | None) -> float:
        ready = ReadyBuckets(self.flat.buckets(), self.flat.slots, fired) if fired else None
        self.flat.open(None if ready is None else ready.arrived)
        compute = self._differentiate if self.task.gradient is None else self._take_gradient
        value = self.run_pass(partial(compute, batch))
        self.flat.close()
        if ready is not None:
            ready.finish()
        return value

    def run_pass(self, work: Callable[[], Result]) -> Result:
        """Run a forward or backward pass, where it may wait if it has to."""
        return work() if self.pass_thread is None else self.pass_thread.run(work)

    def wait_in_passes(self) -> PassThread:
        """From now on passes run in a thread, whose `ask` waits for other ranks; called in `setup`."""
        self.pass_thread = self.pass_thread or PassThread(self.waiting_in_forward)
        return self.pass_thread

    def end_passes(self) -> None:
        """No pass follows: end the thread that they run in, if there is one."""
        if self.pass_thread is not None:
            self.pass_thread.end()

    def _differentiate(self, batch: Batch) -> float:
        with torch.enable_grad():
            loss = self.task.loss_of(self.model, batch)
            value = self.checked(loss)
            loss.backward()  # type: ignore[no-untyped-call]
        return value

    @torch.no_grad()
    def _take_gradient(self, batch: Batch) -> float:
        """Store the gradient of a task that computes it without autograd."""
        assert self.task.gradient is not None
        loss, gradients = self.task.gradient(self.model, *batch)
        value = self.checked(loss)
        slots = {slot.name: slot for slot in self.flat.slots}
        for name, gradient in gradients.items():
            if name not in slots:
                raise unknown("parameter", name, list(slots))
            self.flat.put(slots[name], gradient)
        return value

    def seed_torch(self, rank: int, step: int, key: Hashable = 0) -> None:
        """Make dropout and the like depend on (seed, rank, step) only: the same in both worlds and after a resume."""
        torch.default_generator.manual_seed(hash((self.seed, rank, step, key)) % 2**63)

    @contextmanager
    def waiting_in_forward(self) -> Iterator[None]:
        """Protect torch's generator during a wait in a pass: in virtual time all ranks share it and seed it."""
        state = torch.default_generator.get_state()
        try:
            yield
        finally:
            torch.default_generator.set_state(state)

    def sized(self, batch: Batch) -> Batch:
        """The mini-batch; in a run on sizes only, fields of its sizes."""
        if not self.task.sizes_only:
            return batch
        return tuple(x.new_empty((self.batch_size, *x.shape[1:])) for x in self._example)

    @cached_property
    def _example(self) -> Batch:
        return example(self.task.data, "meta")

    def checked(self, loss: Tensor) -> float:
        """The loss as a float; raises `Diverged` if it is not finite."""
        if loss.is_meta:
            return math.nan
        value = float(loss.detach())
        if not math.isfinite(value):
            raise Diverged(self.rank, self.step, value)
        return value

    # -- memory -----------------------------------------------------------------------------------

    def shared(self, name: str, like: Tensor) -> Tensor:
        """Zeroed memory like this tensor, which all ranks of this host share under this name; of sizes only, sizes."""
        if like.is_meta:
            return torch.empty_like(like)
        return self.transport.shared(name, like.numel(), like.dtype).view(like.shape)

    def slot(self, like: Tensor) -> Tensor:
        """Zeroed memory like this tensor, which a peer of this host can read in place; of sizes only, sizes."""
        return like if like.is_meta else self.transport.slot(like.numel(), like.dtype).view(like.shape)

    def named(self, weights: Sequence[Tensor] | None = None) -> dict[str, Tensor]:
        """Copies of the parameters of what this rank trains, by name, the frozen ones too.

        Those in `flat` are read from `weights` (one tensor per group) if given.
        """
        trained: Mapping[str, Tensor] = self.flat.named()
        if weights is not None:
            trained = {p.name: weights[p.span.group][p.span.start : p.span.stop].view(p.shape) for p in self.flat.slots}
        own = {id(p) for p in self.trained.parameters()}
        named = {name: p for name, p in self.model.named_parameters() if id(p) in own}
        return {name: trained.get(name, p).detach().clone() for name, p in named.items()}
