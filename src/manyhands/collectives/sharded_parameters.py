"""Sharded parameters: some parameters of a model, of which each of P ranks keeps 1/P and has all only for a while.

    rank 0   [ w0 .. w4 |          |          ]      gather    [ w0 .. w14 ]   on every rank, from all shards
    rank 1   [          | w5 .. w9 |          ]      release   no memory
    rank 2   [          |          | w10..w14 ]      reduce    each rank has its span of the sum of all gradients

The memory of the whole is resized to zero and back, and stays the same storage. So what autograd has saved of the
weights in a forward pass is there again in the backward pass, once they are gathered. While they are released, the
model's parameters are views of one NaN, so that reading them by mistake is noticed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from manyhands.core.flat import Flat, ParamSlot, Span
from manyhands.core.port import Collective, even_spans
from manyhands.core.vector_ops import UNCHARGED


class SpareMemory:
    """Memory that is used again: to allocate and free it for each unit would cut the heap into pieces."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def take(self, like: Tensor) -> Tensor:
        """As many elements as `like` has, with any content."""
        for number, memory in enumerate(self._free):
            if memory.dtype == like.dtype and memory.numel() >= like.numel():
                return self._free.pop(number)[: like.numel()]
        self._free = [memory for memory in self._free if memory.dtype != like.dtype]
        return torch.empty(like.shape, dtype=like.dtype, device=like.device)

    def give(self, memory: Tensor) -> None:
        """It is not used any more."""
        self._free.append(memory if memory._base is None else memory._base)


class ShardedParameters:
    """One unit: parameters that lie side by side in a flat model, and are gathered together.

    Args:
        number: of the unit, the same on all ranks.
        flat: the model, whose weights are still whole.
        slots: the parameters.
        ranks: P.
        index: that of this rank.
        spare: memory for gradients, which units share.
    """

    def __init__(
        self, number: int, flat: Flat, slots: Sequence[ParamSlot], ranks: int, index: int, spare: SpareMemory
    ) -> None:
        self.number, self.slots = number, slots
        group, start, _ = slots[0].span
        self.span = Span(group, start, slots[-1].span.stop)
        own = even_spans(self.span.numel, ranks)[index]
        self.own = Span(group, start + own.start, start + own.stop)
        self.weights = flat.weights(self.own).clone()
        """This rank's shard."""
        self.missing = {slot.name for slot in slots}
        """The parameters whose gradient has not arrived."""
        self.is_gathered = True
        self._flat, self._spare = flat, spare
        self._sum: Tensor | None = None
        self.gradient = torch.zeros_like(self.weights)
        """This rank's span of the sum of all gradients. New memory in each step would cut the heap into pieces."""
        self.is_reduced = False
        """Whether the gradients of this step have been added up."""
        self._whole = torch.empty_like(flat.weights(self.span))
        self._views = [self._view(self._whole, slot) for slot in slots]
        self._resize(0)

    def _view(self, whole: Tensor, slot: ParamSlot) -> Tensor:
        start = slot.span.start - self.span.start
        return whole[start : start + slot.span.numel].view(slot.shape)

    def _resize(self, numel: int) -> None:
        self._whole.untyped_storage().resize_(numel * self._whole.element_size())

    def begin(self) -> None:
        """Begin a step: no gradient has arrived."""
        self.missing = {slot.name for slot in self.slots}
        self._sum, self.is_reduced = None, False

    # -- weights ----------------------------------------------------------------------------------

    def gather(self, collective: Collective) -> None:
        """Let the model's parameters have their values."""
        self._resize(self._whole.numel())
        collective.all_gather(self.weights, self._whole)
        self.is_gathered = True
        for slot, view in zip(self.slots, self._views, strict=True):
            self._flat.parameter(slot).data = view

    def release(self) -> None:
        """Free the memory of the whole."""
        self.is_gathered = False
        for slot in self.slots:
            self._flat.parameter(slot).data = self._flat.weights(slot.span).view(slot.shape)
        self._resize(0)

    def copy_whole(self, collective: Collective, keep: bool) -> dict[str, Tensor]:
        """The values of the parameters by name, where they are to be kept; all ranks call this."""
        whole = torch.empty_like(self._whole)
        collective.all_gather(self.weights, whole)
        return {slot.name: self._view(whole, slot) for slot in self.slots} if keep else {}

    # -- gradients --------------------------------------------------------------------------------

    def put(self, slot: ParamSlot, grad: Tensor, scale: float) -> bool:
        """Take the gradient of one parameter; whether it was the last one of the unit."""
        grad = grad.to_dense() if grad.is_sparse else grad
        grad = grad if scale == 1.0 else grad * scale
        self.missing.discard(slot.name)
        UNCHARGED.copy(grad.reshape(slot.shape), self._view(self._own_sum(), slot))
        return not self.missing

    def _own_sum(self) -> Tensor:
        """Memory for the gradients of all slots."""
        if self._sum is None:
            self._sum = self._spare.take(self._whole)
        return self._sum

    def reduce(self, collective: Collective) -> None:
        """Add up the gradients of all ranks; what has not arrived is zero."""
        total = self._own_sum()
        for slot in self.slots:
            if slot.name in self.missing:
                UNCHARGED.zero(self._view(total, slot))
        UNCHARGED.copy(collective.reduce_scatter(total), self.gradient)
        self._spare.give(total)
        self._sum, self.is_reduced = None, True


def units(flat: Flat, ranks: int, index: int, size: int) -> list[ShardedParameters]:
    """All parameters of a model: those of a module together, and of neighbours until they have `size` numbers."""
    found: list[list[ParamSlot]] = []
    for slot in flat.slots:
        last = found[-1] if found else []
        if last and last[0].span.group == slot.span.group and (_same_module(last[-1], slot) or _numel(last) < size):
            last.append(slot)
        else:
            found.append([slot])
    spare = SpareMemory()
    return [ShardedParameters(number, flat, slots, ranks, index, spare) for number, slots in enumerate(found)]


def _same_module(one: ParamSlot, other: ParamSlot) -> bool:
    return one.name.rpartition(".")[0] == other.name.rpartition(".")[0]


def _numel(slots: Iterable[ParamSlot]) -> int:
    return sum(slot.span.numel for slot in slots)
