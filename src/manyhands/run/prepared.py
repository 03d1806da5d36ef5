"""Prepared: a user's model and optimizers, with a strategy between `loss.backward()` and the next forward pass.

    model(x)            the first pass of a step: the strategy runs until it asks for a gradient (a pull, say)
    loss.backward()     gradients arrive
    clip, look at it    in a method that averages gradients, p.grad is the mean now
    optimizer.step()    the strategy runs to the end of its step

Who moves the weights depends on the method:

    equal replicas      every worker has the same mean gradient (bsp, topk-sgd): the user's own optimizer, as in DDP
    all others          the strategy, where the weights are (a server, a peer, this worker), by a rule that is made of
                        the user's optimizer, with its options as they are at this step (live_optimizers.py)

Only hooks that torch has for this are used: the user's model and optimizer remain the objects that they were.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from manyhands.core.errors import Refused, refuse_unless
from manyhands.core.loop_gradients import LoopGradients
from manyhands.core.loop_worker import LoopWorker
from manyhands.core.port import Transport
from manyhands.core.recipe import recipe_of
from manyhands.core.rule import Rule
from manyhands.core.strategy import Strategy
from manyhands.run.handover import Handover
from manyhands.run.live_optimizers import LiveOptimizers
from manyhands.run.loop_state import GroupOptions, LoopState
from manyhands.run.optimizer_guards import guard_state, refuse_unknown
from manyhands.run.pass_seeds import PassSeeds
from manyhands.run.sample_weights import samples_in
from manyhands.run.training import Training

SCHEDULERS = LRScheduler, ReduceLROnPlateau


@dataclass(frozen=True)
class LoopObjects:
    """What a user passes to `prepare`, by kind."""

    models: list[nn.Module]
    optimizers: list[torch.optim.Optimizer]
    loaders: list[DataLoader[Any]]
    schedulers: list[Any]
    scalers: list[torch.amp.GradScaler]

    @classmethod
    def of(cls, objects: Sequence[Any]) -> LoopObjects:
        """Sort them; refused if one is of another kind, or a model or an optimizer is missing."""
        kinds = nn.Module, torch.optim.Optimizer, DataLoader, SCHEDULERS, torch.amp.GradScaler
        for one in objects:
            if not isinstance(one, kinds):
                raise Refused(
                    f"prepare was given a {type(one).__name__}, but takes models, optimizers, loaders, schedulers and "
                    "gradient scalers"
                )
        found = cls(*([one for one in objects if isinstance(one, kind)] for kind in kinds))  # type: ignore[arg-type]
        refuse_unless(bool(found.models), "the number of models to prepare", 0, ">= 1")
        refuse_unless(bool(found.optimizers), "the number of optimizers to prepare", 0, ">= 1")
        return found

    def refuse_scalers(self, strategy: Strategy) -> None:
        """Refuse a scaler, which skips the steps of one worker alone, where all must take equally many."""
        traits = strategy.traits
        if self.scalers and traits.lockstep and not (traits.equal_replicas or traits.may_end_early):
            raise Refused(
                f"prepare was given a GradScaler, but {recipe_of(strategy).name} needs equally many steps of all "
                "workers, and a scaler skips those of one whose gradient is infinite: use autocast with bfloat16 "
                "without a scaler, or a method whose replicas are equal, such as bsp"
            )

    def state(self, strategy: Strategy) -> LoopState:
        """What is saved of them; the memory of an optimizer that the strategy steps by is part of its state."""
        own_step = strategy.traits.equal_replicas
        optimizers: Sequence[Any] = self.optimizers if own_step else [GroupOptions(one) for one in self.optimizers]
        return LoopState({"optimizer": optimizers, "scheduler": self.schedulers, "scaler": self.scalers})


class Prepared:
    """The models and optimizers of a user's loop on one rank.

    Args:
        transport: connects this rank with the others.
        models: trained together; they may be several, such as an actor and a critic.
        optimizers: each steps by itself; together they have all parameters of the models.
        strategy: the method.
        seed: determines everything random.
    """

    def __init__(
        self,
        transport: Transport,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        strategy: Strategy,
        seed: int,
    ) -> None:
        if strategy.traits.needs_step:
            raise Refused(
                f"{recipe_of(strategy).name} cannot be trained by a loop that calls backward() itself: "
                f"{strategy.traits.needs_step}; use hands.step(x, y)"
            )
        self._model = models[0] if len(models) == 1 else nn.ModuleList(models)
        self._own_step = strategy.traits.equal_replicas
        self._optimizers = optimizers
        named = dict(self._model.named_parameters())
        refuse_unknown(optimizers, named)
        self._live = None if self._own_step else LiveOptimizers(optimizers, named)
        how: Rule | LiveOptimizers = self._live or Handover()
        self.training = Training(transport, self._model, None, strategy, how, seed, LoopWorker)
        self.training.gradients_from = "it would be dropped: take its step before prepare"
        assert isinstance(self.training.worker, LoopWorker)
        self.worker: LoopWorker = self.training.worker
        self._models = models
        self._handles: list[Any] = []
        self._is_driven = False
        self._frozen = {name for name, p in named.items() if not p.requires_grad}
        self._passes = PassSeeds(self.worker)

    def begin(self, batch_size: int) -> None:
        """Unite with all other ranks; a server rank serves here until the workers have ended."""
        self.training.unite(batch_size)
        if self.worker.transport.role != "worker":
            self.training.begin(batch_size, 0)
            return
        for model in self._models:
            self._handles.append(model.register_forward_pre_hook(self._before_forward, with_kwargs=True))
            self._handles.append(model.register_forward_hook(self._after_forward, always_call=True))
        for optimizer in self._optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self._before_step))
            self._handles.append(optimizer.register_step_post_hook(self._after_step))
            if self._live is not None:
                self._handles += guard_state(optimizer)

    def start(self) -> None:
        """Set the strategy up, at the first call: before the first step, so that a checkpoint can be loaded first."""
        if not self.training.has_begun:
            for name, p in self._model.named_parameters():
                if p.requires_grad and name in self._frozen:
                    raise Refused(f"{name} was frozen when training began, but is to be trained now: join again")
            self.training.begin(None, 0)
            self.worker.drive(self.training.run.step)
            self._is_driven = True
            average = self._average if self._own_step else None
            self._gradients = LoopGradients(self.worker.flat, average, begun=lambda: self.worker.in_step)

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def _before_forward(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """A forward pass that is to be trained by; the first one of a step begins it."""
        if torch.is_grad_enabled() and not self.training.shows_answer:
            with self.worker.waiting_in_forward():
                self.training.between_steps()
                self.start()
                if not self._own_step:  # it may wait for other workers before it has a gradient
                    self.training.position.at_step()
                self._request()
            self.worker.samples_in_step += samples_in((args, kwargs)) or 0
            self._passes.begin()

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def _after_forward(self, model: nn.Module, args: Any, outputs: Any) -> None:
        self._passes.end()

    def _request(self) -> None:
        """Let the strategy run until it asks for a gradient, if it has not."""
        if not self.worker.in_step:
            self.training.changes.refuse()
            self.worker.request()
            self.training.changes.note()

    def _average(self) -> None:
        """The gradient of this step is complete: let the strategy replace it by the mean of all workers."""
        self.training.position.at_step()
        self._request()
        self._weigh_and_supply()

    def _weigh_and_supply(self) -> None:
        """Scale the gradient by this worker's share of the samples; let the strategy complete its step."""
        scale = self.training.sample_weights.scale(self.worker.samples_in_step or 1)
        for group in self.worker.flat.groups if scale != 1.0 else ():
            group.grad.mul_(scale)
        self.training.changes.refuse()
        self.worker.supply()
        self.training.changes.note()
        self.worker.samples_in_step = 0

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if any(one is not None for one in (*args[1:], *kwargs.values())):
            raise Refused("optimizer.step() was given a closure, but must have none: it would compute other gradients")
        self.training.refuse_within_answer("optimizer.step()")
        if self._live is not None and getattr(optimizer, "grad_scale", None) is not None:
            raise Refused(
                "a fused optimizer was to unscale its gradients, but the method steps: scaler.unscale_() before"
            )
        self._start_late()
        if self._live is not None:
            self.training.position.at_step()
            self._request()  # from then on the flat gradient may be written
        self._gradients.settle()
        self._taken = self._gradients.take([p for group in optimizer.param_groups for p in group["params"]])
        if not self._own_step:
            for slot in self._taken:  # so that torch's own step, which comes next, moves nothing
                self.worker.flat.parameter(slot).grad = None

    def _start_late(self) -> None:
        """Start, if no forward pass has done so: gradients that were computed before count for this step."""
        if not self.training.has_begun:
            gradients = [(p, p.grad) for p in self._model.parameters()]
            self.start()
            for p, gradient in gradients:
                p.grad = gradient
            self._gradients.adopt()

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._live is not None:
            self._supply()
        self._gradients.used(self._taken)

    @torch.no_grad()
    def _supply(self) -> None:
        """Give the strategy the gradients of the optimizer that steps, and the options of all groups."""
        flat = self.worker.flat
        self.training.read_options()
        self._gradients.set_aside(self._taken)
        flat.mark(self._taken)
        flat.close()
        self._weigh_and_supply()
        for slot in self._taken:
            flat.parameter(slot).grad = flat.gradient_of(slot)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Backward passes in here are not the last of their step: gradients remain this worker's own."""
        self.start()
        self._gradients.accumulates = True
        try:
            yield
        finally:
            self._gradients.accumulates = False

    def end(self) -> bool:
        """Leave the user's objects as they were, finish, load the answer; whether this rank was the lead."""
        self.release()
        return self.training.end()

    def release(self) -> None:
        """Remove all hooks, and end a step that will get no gradient."""
        for handle in self._handles:
            handle.remove()
        if self._handles:
            self._handles.clear()
            if self._is_driven:
                self.worker.abandon()
