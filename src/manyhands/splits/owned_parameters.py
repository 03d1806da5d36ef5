"""Owned parameters: those that every member of a team of slices computes with, and one of them trains.

    owner     sends its parameters to the others before the forward passes; its gradient is the whole gradient
    others    compute with what they received, and drop its gradient

Why not train a copy on each: gradients of copies are equal, but in asynchronous training updates are not. The members
of a team push and pull at different times.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from manyhands.core.errors import ManyhandsError
from manyhands.core.param_cut import ParamCuts
from manyhands.core.port import Tag, recv
from manyhands.core.worker import Worker
from manyhands.splits.slice_exchange import SliceExchange
from manyhands.splits.slice_plan import SlicedLayer

COPIES = Tag("copies", carries="nothing")
TOLERANCE = 1e-3
"""Of sums and norms of gradients that are computed from the same numbers, on processors that may differ."""


class SlicePart(nn.Module):
    """What one member trains: its slices, and the parameters that it owns, with the buffers beside them.

    Args:
        whole: the model, or a stage of it, that every member runs.
        layers: those that are divided.
        owners: the index of the owner of every other parameter, by name in the model.
        index: of this member.
        halves: the parts of the whole that are divided in different ways.
        all_buffers: whether every member has buffers of its own, because each computes other samples.
    """

    def __init__(
        self,
        whole: nn.Module,
        layers: Sequence[SlicedLayer],
        owners: Mapping[str, int],
        index: int,
        *,
        halves: Sequence[nn.Module] = (),
        all_buffers: bool = False,
    ) -> None:
        super().__init__()
        self._unregistered = (whole, *halves)
        self.layers, self.owners, self.index = layers, owners, index
        for number, (name, p) in enumerate(whole.named_parameters()):
            if owners.get(name, index) == index:
                self.register_parameter(f"p{number}", p)
        for number, buffer in enumerate(whole.buffers() if index == 0 or all_buffers else ()):
            self.register_buffer(f"b{number}", buffer)

    @property
    def whole(self) -> nn.Module:
        """What every member runs. It is no module of this one: its other parameters are trained elsewhere."""
        return self._unregistered[0]

    @property
    def halves(self) -> Sequence[nn.Module]:
        """The parts of it that are divided in different ways."""
        return self._unregistered[1:]


def owners(model: nn.Module, cuts: ParamCuts, size: int) -> Mapping[str, int]:
    """Which member owns each parameter that is not divided: the largest first, each to the one with the least."""
    shared = [(name, p) for name, p in model.named_parameters() if name not in cuts]
    held, found = [0] * size, dict[str, int]()
    for name, p in sorted(shared, key=lambda one: -one[1].numel()):
        found[name] = held.index(min(held))
        held[found[name]] += p.numel()
    return {name: found[name] for name, _ in shared}


class OwnedParameters:
    """The parameters of a part that are not divided.

    Args:
        w: this rank.
        part: what it trains.
        exchange: connects the members.
        module: what is meant of the part; None: all.
    """

    def __init__(self, w: Worker, part: SlicePart, exchange: SliceExchange, module: nn.Module | None = None) -> None:
        inside = {id(p) for p in (part.whole if module is None else module).parameters()}
        named = {n: p for n, p in part.whole.named_parameters() if n in part.owners and id(p) in inside}
        self._exchange, self._index, self._checked = exchange, part.index, False
        names = {id(p): name for name, p in w.model.named_parameters()}
        slots = {slot.name: slot for slot in w.flat.slots}
        self._flat = w.flat
        self._slots = {name: slots.get(names[id(p)]) for name, p in named.items()}
        self._parameters, self._owners = named, part.owners
        self._groups = [
            _DtypeShare({name: p for name, p in named.items() if p.dtype == dtype}, part.owners, exchange)
            for dtype in sorted({p.dtype for p in named.values()}, key=str)
        ]

    @torch.no_grad()
    def share(self) -> None:
        """Send what this rank owns, receive the rest."""
        for group in self._groups:
            group.share()

    def finish(self, loss: float) -> None:
        """Drop the gradients of copies; in the first step compare them with those of the owners."""
        if not self._checked:
            self._checked = True
            self._compare(loss)
        self._end()

    def restore(self) -> None:
        """The parameters of this rank are those that it trains, and not what it has sent."""
        for group in self._groups:
            group.restore()

    def _end(self) -> None:
        self.restore()
        for name, p in self._parameters.items():
            if self._slots[name] is None:
                p.grad = None

    @torch.no_grad()
    def sum_at_owners(self) -> None:
        """Add up the gradients of all members, which come from other samples, where their parameter is trained."""
        trained = {name: p for name, p in self._parameters.items() if p.requires_grad}
        for dtype in sorted({p.dtype for p in trained.values()}, key=str):
            named = {name: p for name, p in trained.items() if p.dtype == dtype}
            by_owner = [[n for n in named if self._owners[n] == k] for k in range(self._exchange.size)]
            empty = next(iter(named.values())).new_empty(0)
            xs = [torch.cat([empty, *(self._gradient(name).reshape(-1) for name in some)]) for some in by_owner]
            total = self._exchange.sum_own(xs, "the own samples")
            start = 0
            for name in by_owner[self._index]:
                slot = self._slots[name]
                assert slot is not None
                self._flat.put(slot, total[start : start + slot.span.numel].view(slot.shape))
                start += slot.span.numel
        self._end()

    def _gradient(self, name: str) -> Tensor:
        """What this rank has computed; zeros if it has not used the parameter."""
        slot, p = self._slots[name], self._parameters[name]
        if slot is not None:
            return self._flat.take_back(slot)
        return torch.zeros_like(p) if p.grad is None else p.grad.to_dense() if p.grad.is_sparse else p.grad

    def _compare(self, loss: float) -> None:
        """A gradient that differs belongs to a parameter that is used on slices: between `column` and `row`, say."""
        members = self._exchange.members
        names = [name for name, p in self._parameters.items() if p.requires_grad]
        mine = (loss, *(number for name in names for number in self._facts(name)))
        others = [index for index in range(members.size) if index != self._index]
        for index in others:
            members.send(index, COPIES, mine)
        for index in others:
            message = recv(members, COPIES, frm=index)
            theirs = message.meta[: len(mine)]
            message.release()
            for number, (one, other) in enumerate(zip(mine, theirs, strict=True)):
                if not math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=TOLERANCE * 1e-3):
                    what = "the loss" if number == 0 else f"the gradient of {names[(number - 1) // 2]}"
                    raise ManyhandsError(
                        f"{what} differs between the ranks of a team of slices ({one:.6g} and {other:.6g}), but must "
                        "not: something between slices that are kept apart is not elementwise, or has parameters"
                    )

    def _facts(self, name: str) -> tuple[float, float]:
        slot, p = self._slots[name], self._parameters[name]
        gradient: Tensor | None = p.grad if slot is None else self._flat.gradient_of(slot)
        if gradient is None or gradient.numel() == 0:
            return 0.0, 0.0
        gradient = gradient.to_dense() if gradient.is_sparse else gradient
        return float(gradient.double().abs().sum()), float(gradient.double().norm())


class _DtypeShare:
    """Parameters of one dtype: memory for those of every owner, in the order of the owners."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], owners: Mapping[str, int], exchange: SliceExchange
    ) -> None:
        self._exchange = exchange
        by_owner = [[p for name, p in parameters.items() if owners[name] == k] for k in range(exchange.size)]
        first = next(iter(parameters.values()))
        sizes = [sum(p.numel() for p in some) for some in by_owner]
        self._memory = first.detach().new_empty(sum(sizes))
        self._spans = list(torch.split(self._memory, sizes))
        self._own = by_owner[exchange.index]
        self._views = [
            (p, view.view(p.shape))
            for some, span in zip(by_owner, self._spans, strict=True)
            for p, view in zip(some, torch.split(span, [p.numel() for p in some]), strict=True)
        ]
        self._trained: list[Tensor] = []

    def share(self) -> None:
        """All compute with the same numbers, also the owner, whose weights other activities may move in a pass."""
        own = self._spans[self._exchange.index]
        if self._own:
            torch.cat([p.detach().reshape(-1) for p in self._own], out=own)
        self._exchange.share(own, self._spans, "what is not divided")
        self._trained = [p.data for p in self._own]
        for p, view in self._views:
            p.data = view

    def restore(self) -> None:
        for p, trained in zip(self._own, self._trained, strict=True):
            p.data = trained
