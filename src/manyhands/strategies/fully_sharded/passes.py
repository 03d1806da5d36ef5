"""Passes over sharded parameters: a module's weights are gathered before it runs, its gradient is scattered after.

    forward     gather 1 · run 1 · gather 2 · run 2 · gather 3 · run 3
    backward                                                       3 back · scatter 3 · gather 2 · 2 back · scatter 2

Weights are released when the next ones are gathered, so those of the last module need not be gathered again. In the
backward pass they are gathered when the gradient of the module's output is there, and released when the gradients of
all parameters of the unit have been summed over the ranks.

All ranks must gather and scatter the same units in the same order. Were this not so (a branch that depends on data),
sums would silently be those of different layers, so a step ends by comparing what each rank has done.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.collectives import collective
from manyhands.collectives.sharded_parameters import ShardedParameters, units
from manyhands.core.errors import ManyhandsError, Refused, unknown
from manyhands.core.flat import ParamSlot
from manyhands.core.released import release_gradients, release_weights
from manyhands.core.strategy import Batch
from manyhands.core.work import owner
from manyhands.core.worker import Worker
from manyhands.splits.placeholder import tensors_in
from manyhands.strategies.fully_sharded.reads import OUTSIDE, ParameterReads

Units = Sequence[ShardedParameters]


class ShardedPasses:
    """The forward and backward passes of one worker.

    Args:
        w: the worker; the weights of its model are whole until the end of its first step.
        keep: whether weights stay gathered from the forward pass to the backward pass.
        unit: how many numbers are gathered together at least.
    """

    def __init__(self, w: Worker, keep: bool, unit: int) -> None:
        self._w, self._keep = w, keep
        self.units = units(w.flat, len(w.workers), w.workers.index(w.rank), unit)
        self._unit_of = {slot.name: unit for unit in self.units for slot in unit.slots}
        self._collective = collective("auto", w.transport, w.workers)
        self._ask = w.wait_in_passes().ask
        self._users: Sequence[tuple[nn.Module, Units]] = ()
        self._always: Units = ()
        self._running = self._backward = False
        self._is_whole = True
        self._charged = 0.0
        w.flat.receive = self._receive
        release_gradients(w.flat)

    def gradient(self, batch: Batch) -> float:
        """Compute the loss of a mini-batch, which is returned; every unit gets its gradient."""
        w = self._w
        w.seed_torch(w.rank, w.step)
        self._active: Counter[int] = Counter()
        self._idle: dict[int, ShardedParameters] = {}
        self._calls: list[int] = []
        self._running, self._backward, self._charged = True, False, 0.0
        self._samples = len(batch[0]) if batch else w.batch_size
        for unit in self.units:
            unit.begin()
        with w.timer.computing():
            if w.task.sizes_only:
                loss = self._pass_on_sizes()
            elif w.task.gradient is not None:
                loss = self._own_pass(batch)
            else:
                loss = w.run_pass(partial(self._first_pass if self._is_whole else self._pass, batch))
            self._end()
        return loss

    # -- the pass ---------------------------------------------------------------------------------

    def _first_pass(self, batch: Batch) -> float:
        """Whole weights, whose readers are found; then they are released."""
        reads = ParameterReads(self._w.model, self._w.flat)
        with torch.enable_grad():
            with reads:
                loss = self._w.task.loss_of(self._w.model, batch)
            value = self._w.checked(loss)
            self._backward = True
            loss.backward()  # type: ignore[no-untyped-call]
        self._find_users(reads)
        return value

    def _find_users(self, reads: ParameterReads) -> None:
        """The units that each module needs: of the parameters that it reads, and of those that it has."""
        users: dict[str | None, dict[int, ShardedParameters]] = {}
        for name, readers in reads.readers.items():
            for reader in {owner(name), *readers}:
                users.setdefault(reader, {})[self._unit_of[name].number] = self._unit_of[name]
        self._always = list(users.pop(OUTSIDE, {}).values())
        modules = dict(self._w.model.named_modules())
        self._users = [(modules[name], list(found.values())) for name, found in users.items() if name is not None]

    def _pass(self, batch: Batch) -> float:
        with self._hooked(), torch.enable_grad():
            self._enter(self._always)
            loss = self._w.task.loss_of(self._w.model, batch)
            value = self._w.checked(loss)
            self._backward = True
            loss.backward()  # type: ignore[no-untyped-call]
        return value

    @torch.no_grad()
    def _own_pass(self, batch: Batch) -> float:
        """The gradient of a task that computes it without autograd, from all weights."""
        assert self._w.task.gradient is not None
        self._enter(self.units)
        loss, gradients = self._w.task.gradient(self._w.model, *batch)
        value = self._w.checked(loss)
        slots = {slot.name: slot for slot in self._w.flat.slots}
        self._backward = True
        for name, gradient in gradients.items():
            if name not in slots:
                raise unknown("parameter", name, list(slots))
            if self._unit_of[name].put(slots[name], gradient, self._w.flat.scale):
                self._scatter(self._unit_of[name])
        return value

    def _pass_on_sizes(self) -> float:
        """What a pass sends and how long it takes, for a model of sizes only."""
        for unit in self.units:
            self._enter([unit])
            self._leave([unit])
        self._backward = True
        for unit in reversed(self.units):
            self._need([unit])
            self._scatter(unit)
        return math.nan

    @contextmanager
    def _hooked(self) -> Iterator[None]:
        """Within it modules have their weights while they run."""
        with ExitStack() as hooks:
            for module, found in self._users:
                hooks.callback(module.register_forward_pre_hook(self._before(found)).remove)
                hooks.callback(module.register_forward_hook(self._after(found)).remove)
            yield

    def _before(self, found: Units) -> Callable[[nn.Module, Any], None]:
        return lambda module, args: self._enter(found)

    def _after(self, found: Units) -> Callable[[nn.Module, Any, Any], None]:
        def after(module: nn.Module, args: Any, out: Any) -> None:
            outputs = [x for x in tensors_in(out) if x.requires_grad]
            for x in outputs:
                x.register_hook(lambda grad: self._need(found))  # type: ignore[no-untyped-call]
            if outputs or not torch.is_grad_enabled():
                self._leave(found)  # else its backward pass would begin unnoticed: the weights remain to the end

        return after

    def _enter(self, found: Units) -> None:
        """A module that needs these units begins."""
        self._need(found)
        self._active.update(unit.number for unit in found)

    def _leave(self, found: Units) -> None:
        """It has ended."""
        for unit in found:
            self._active[unit.number] -= 1
            if not (self._active[unit.number] or self._backward or self._keep):
                self._idle[unit.number] = unit

    def _need(self, found: Units) -> None:
        """Gather those that are not there."""
        for unit in found:
            self._idle.pop(unit.number, None)
        absent = [unit for unit in found if not unit.is_gathered]
        if absent:
            self._ask(partial(self._gather, absent))

    @torch.no_grad()
    def _gather(self, absent: Units) -> None:
        """In the rank's own line: free what is not used any more, then gather."""
        for unit in self._idle.values():
            unit.release()
        self._idle.clear()
        for unit in absent:
            self._calls.append(unit.number)
            unit.gather(self._collective)
            if not self._backward:
                self._charge(unit)

    def _receive(self, slot: ParamSlot, p: Tensor) -> None:
        """Autograd has accumulated the gradient of a parameter."""
        if not self._running or p.grad is None:
            raise Refused(
                "backward() was called between two steps, but the weights are divided among the workers: "
                "use hands.step(x, y)"
            )
        grad, p.grad = p.grad, None
        unit = self._unit_of[slot.name]
        if unit.put(slot, grad, self._w.flat.scale):
            del grad
            self._ask(partial(self._scatter, unit))

    @torch.no_grad()
    def _scatter(self, unit: ShardedParameters) -> None:
        """In the rank's own line: release the weights of a unit, and add up its gradient."""
        self._charge(unit)
        self._calls.append(-1 - unit.number)
        if unit.is_gathered and not self._is_whole:
            unit.release()
        unit.reduce(self._collective)

    def _charge(self, unit: ShardedParameters) -> None:
        """Let the time of a unit's modules pass: of their forward pass, or of their backward pass."""
        if self._w.work is not None:
            work = self._w.work.share({owner(slot.name) for slot in unit.slots})
            share = work.backward if self._backward else work.forward
            share = min(share, 1.0 - self._charged)
            self._charged += share
            self._w.charge_passes(self._samples, share)

    # -- the end of a step ------------------------------------------------------------------------

    @torch.no_grad()
    def _end(self) -> None:
        """Add up what is missing on this rank, release all weights, let the rest of the time pass."""
        self._running = False
        self._w.charge_passes(self._samples, max(0.0, 1.0 - self._charged))
        for unit in self.units:
            if not unit.is_reduced:
                self._scatter(unit)
        if self._is_whole:
            release_weights(self._w.flat)
        for unit in self.units:
            if unit.is_gathered:
                unit.release()
        self._is_whole = False

    @torch.no_grad()
    def untouched(self) -> frozenset[int]:
        """The ids of the parameters that no rank touched; refused if the ranks have not done the same."""
        touched = [slot.name not in self._unit_of[slot.name].missing for slot in self._w.flat.slots]
        code = zlib.crc32(repr(self._calls).encode()) % 2**20
        total = torch.tensor([*map(float, touched), code, code**2], dtype=torch.float64)
        self._collective.all_reduce(total)
        *counts, codes, squares = total.tolist()
        ranks = len(self._w.workers)
        if (codes, squares) != (ranks * code, ranks * code**2):
            raise ManyhandsError(
                f"the workers gathered different modules in step {self._w.step}: with fully-sharded all of them must "
                "run the same modules in the same order"
            )
        ids = (slot.param_id for slot, count in zip(self._w.flat.slots, counts, strict=True) if not count)
        return frozenset() if self._w.task.sizes_only else frozenset(ids)

    @torch.no_grad()
    def whole(self, keep: bool) -> dict[str, Tensor]:
        """The weights of all units by name, where they are to be kept; all ranks call this."""
        found: dict[str, Tensor] = {}
        for unit in self.units:
            found.update(unit.copy_whole(self._collective, keep))
        return found
