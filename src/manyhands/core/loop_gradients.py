"""LoopGradients: the gradients of a model whose backward passes the user's own loop starts.

    backward      p.grad is a view of the flat gradient: a later backward pass of the same step adds to it
    in between    the user clips, scales or replaces p.grad
    step          the gradients of the optimizer's parameters are complete

For a method that averages gradients, p.grad must be the mean over all workers as soon as the user looks at it, as in
DDP. It is a `PendingGradient` until then: the first operation on any of them averages all. Inside a backward pass and
inside `accumulate` it is the worker's own.

Some methods leave the mean in memory that all workers read (`flat.means`). An optimizer reads it there; it is copied
into the gradient's own memory when the user's code looks at it, because that may change it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor

from manyhands.core.errors import ManyhandsError, Refused
from manyhands.core.flat import Flat, ParamSlot
from manyhands.core.port import inside_backward

FACTS = frozenset(
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "layout", "is_sparse", "requires_grad", "grad_fn", "is_leaf", "ndim")
)
"""What can be asked of a gradient without its numbers."""


class PendingGradient(Tensor):
    """A gradient that is averaged over all workers when it is first used."""

    settle: Callable[[], None]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in FACTS:
            for gradient in _pending(args):
                gradient.settle()
                break  # the first one averages all
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _pending(args: Iterable[Any]) -> Iterable[PendingGradient]:
    for one in args:
        if isinstance(one, PendingGradient):
            yield one
        elif isinstance(one, list | tuple):
            yield from _pending(one)


class LoopGradients:
    """The state of every parameter's gradient between two steps.

    Args:
        flat: the model's parameters and gradients.
        average: replaces the flat gradient by the mean over all workers; None if the method does not.
        begun: whether the method waits for a gradient: before that, its memory may be lent.
    """

    def __init__(self, flat: Flat, average: Callable[[], None] | None, begun: Callable[[], bool]) -> None:
        self._flat = flat
        self._average, self._begun = average, begun
        self._own: set[ParamSlot] = set()
        """Arrived since the last step, and not averaged."""
        self._averaged: set[ParamSlot] = set()
        self._used: set[ParamSlot] = set()
        """Those that an optimizer has stepped by, until a new gradient replaces them."""
        self.accumulates = False
        """Whether further backward passes of the same step are to come."""
        self._aside: dict[ParamSlot, Tensor] = {}
        """Averaged gradients for a later step of another optimizer, while the flat gradient has new ones."""
        self._is_behind = False
        """Whether the mean is in other memory (`flat.means`), and not in the gradient's own yet."""
        self._views = [self._view(slot) for slot in flat.slots]
        flat.receive = self._receive

    def _view(self, slot: ParamSlot) -> Tensor:
        plain = self._flat.gradient_of(slot)
        if self._average is None:
            return plain
        pending = torch.Tensor._make_subclass(PendingGradient, plain)
        pending.settle = self._settle_on_use
        return pending

    def _settle_on_use(self) -> None:
        if self._is_behind:
            self._catch_up()
        elif not (self.accumulates or inside_backward()):
            self.settle()
            if self._is_behind:
                self._catch_up()

    def _catch_up(self) -> None:
        """Copy the mean into the gradient's own memory: the user may change it there."""
        assert self._flat.means is not None
        self._is_behind = False
        with torch.no_grad():
            for slot in self._averaged | self._used:
                p = self._flat.parameter(slot)
                if p.grad is self._views[slot.param_id]:
                    p.grad = self._flat.gradient_of(slot).copy_(self._flat.means[slot.param_id])

    def _receive(self, slot: ParamSlot, p: Tensor) -> None:
        """Inside a backward pass: show the gradient as a view of the flat one."""
        view = self._views[slot.param_id]
        plain = self._flat.gradient_of(slot)
        assert p.grad is not None
        if self._average is None and not self._begun():
            raise Refused(
                f"{slot.name} has got a gradient, but there was no forward pass of the prepared model: call the model "
                "itself, as model(x), not a part of it and not model.forward(x); prepare a model that is compiled"
            )
        adds = p.grad is view or p.grad is plain or p.grad is self._aside.get(slot)
        if adds and slot in self._used:
            raise ManyhandsError(
                f"the gradient of {slot.name} was not cleared after optimizer.step(): call optimizer.zero_grad()"
            )
        if adds and slot in self._averaged:
            raise ManyhandsError(
                f"the gradient of {slot.name} was used, which averages it over all workers, before another backward "
                "pass of the same step: put all but the last backward pass into `with hands.accumulate():`"
            )
        if self._is_behind:
            self._catch_up()
        if not adds:
            if p.grad.is_sparse:
                plain.zero_().add_(p.grad)
            else:
                plain.copy_(p.grad)
            p.grad = view
        self._own.add(slot)
        self._averaged.discard(slot)
        self._used.discard(slot)

    def adopt(self) -> None:
        """Take the gradients that were computed before this object was made for those of the step that has begun."""
        for slot in self._flat.slots:
            if self._flat.parameter(slot).grad is not None:
                self._receive(slot, self._flat.parameter(slot))

    def settle(self) -> None:
        """Average all gradients that have arrived, at the first call after a backward pass."""
        if self._average is None or not self._own:
            return
        for slot in self._own:
            self._keep_replaced(slot)
        self._set_averaged_aside()
        self._flat.mark(sorted(self._own, key=lambda slot: slot.param_id))
        self._flat.close()
        self._averaged |= self._own
        self._own.clear()
        self._average()
        self._is_behind = self._flat.means is not None
        untouched = self._flat.untouched()
        for slot in self._flat.slots:
            if slot.param_id not in untouched:
                found = self._views[slot.param_id] if self._is_behind else self._flat.gradient_of(slot)
                self._flat.parameter(slot).grad = found
                self._averaged.add(slot)

    def _set_averaged_aside(self) -> None:
        """Move means that were not used yet out of the flat gradient, which is about to be averaged again."""
        for slot in self._averaged - self._own:
            p = self._flat.parameter(slot)
            if p.grad is not None and (p.grad is self._views[slot.param_id] or p.grad is self._flat.gradient_of(slot)):
                p.grad = self._aside[slot] = p.grad.clone()

    def take(self, params: Collection[Tensor]) -> list[ParamSlot]:
        """The parameters of an optimizer that have a gradient, which is complete and in place now."""
        mine = {id(p) for p in params}
        slots = [slot for slot in self._flat.slots if id(self._flat.parameter(slot)) in mine]
        found = []
        for slot in slots:
            p = self._flat.parameter(slot)
            if p.grad is None:
                self._own.discard(slot)
            elif slot in self._used:
                raise Refused(
                    f"optimizer.step() was called again, but {slot.name} has no new gradient: call backward() before"
                )
            else:
                self._keep_replaced(slot)
                if self._is_behind and self._flat.means is not None and p.grad is self._views[slot.param_id]:
                    p.grad = self._flat.means[slot.param_id]  # an optimizer only reads it
                found.append(slot)
        return found

    def _keep_replaced(self, slot: ParamSlot) -> None:
        """Copy a gradient that the user has put in place of ours into the flat one."""
        grad, plain = self._flat.parameter(slot).grad, self._flat.gradient_of(slot)
        if grad is not None and grad is not plain and grad is not self._views[slot.param_id]:
            plain.copy_(grad)

    def set_aside(self, taken: Collection[ParamSlot]) -> None:
        """Move the gradients of other optimizers, which are for a later step, out of the flat one."""
        for slot in self._own.difference(taken):
            p = self._flat.parameter(slot)
            if p.grad is not None:
                p.grad = p.grad.clone()

    def used(self, slots: Iterable[ParamSlot]) -> None:
        """An optimizer has stepped by these gradients."""
        self._used.update(slots)
        for slot in slots:
            self._aside.pop(slot, None)
        self._own.difference_update(slots)
        self._averaged.difference_update(slots)
        for slot in self._used if self._is_behind else ():
            p = self._flat.parameter(slot)
            if self._flat.means is not None and p.grad is self._flat.means[slot.param_id]:
                p.grad = self._views[slot.param_id]
