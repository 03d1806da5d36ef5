"""Slice exchange: what the members of a team send one another inside a layer, both ways.

    function       forward pass                  backward pass
    copy           the same on all               the sum of all errors           (f of Megatron)
    sum            the sum of all slices         the same on all                 (g)
    gather         all slices, joined            the own slice of the error
    scatter        the own slice                 all slices of the error, joined
    own errors     the same on all               the own slice of the sum of all errors; the rest is 0

Written as autograd functions, because those of torch sum a second time going back. Each message names the layer, the
direction and the number of the call: sums of different layers, or of a member that has left one out, raise an error
instead of being taken for one another.

A gathered dimension may be divided unevenly: its slices are exchanged directly, each rank's with every other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from manyhands.collectives import collective
from manyhands.core.errors import ManyhandsError
from manyhands.core.pass_thread import PassThread
from manyhands.core.port import ANY, Message, Meta, Tag, Transport
from manyhands.core.subgroup import Subgroup

Op = Callable[[Tensor], Tensor]
Call = tuple[str, str, int]
"""The name of a layer, a direction, and how many such calls this pass has made before."""
Widths = Sequence[int]
"""How wide the slice of each member is."""


class NamedCalls(Subgroup):
    """The members of a team, whose messages name the call in which they are sent."""

    call: Call = ("", "", 0)

    def send(self, to: int, tag: Tag, meta: Meta = (), tensors: Sequence[Tensor] = (), *, latest: bool = False) -> None:
        super().send(to, tag, (*meta, *self.call), tensors, latest=latest)

    def recv(self, *tags: Tag, frm: int = ANY, timeout: float | None = None) -> Message | None:
        message = super().recv(*tags, frm=frm, timeout=timeout)
        if message is not None and message.meta[-3:] != self.call:
            there, here = (_words(call) for call in (message.meta[-3:], self.call))
            raise ManyhandsError(
                f"member {message.frm} of the team is in {there}, but member {self.rank} in {here}: "
                "their forward passes differ"
            )
        return message


def _words(call: Any) -> str:
    name, direction, number = call
    return f"the {direction} pass of {name or 'the model'} (call {number})"


class Exchange(torch.autograd.Function):
    """One operation in the forward pass, another one in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Op, back: Op) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, *errors: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(errors[0]), None, None


class SliceExchange:
    """The exchanges of one member.

    Args:
        members: the ranks of the team.
        asks: carries out in the rank's own line what a pass waits for.
    """

    def __init__(self, members: Transport, asks: PassThread) -> None:
        self.members = NamedCalls(members, range(members.size), "slices")
        self.index, self.size = members.rank, members.size
        self._asks = asks
        self._collective = collective("butterfly" if self.size == 2 else "ring", self.members, range(self.size))
        self._calls: Counter[str] = Counter()

    def begin(self) -> None:
        """A new pass: calls are counted from 0."""
        self._calls.clear()

    # -- with both directions ---------------------------------------------------------------------

    def copy(self, x: Tensor, layer: str) -> Tensor:
        return self._apply(x, layer, _same, self._sum)

    def sum(self, x: Tensor, layer: str) -> Tensor:
        return self._apply(x, layer, self._sum, _same)

    def gather(self, x: Tensor, layer: str, dim: int, widths: Widths) -> Tensor:
        return self._apply(x, layer, partial(self._join, dim, widths), partial(self._own, dim, widths))

    def scatter(self, x: Tensor, layer: str, dim: int, widths: Widths) -> Tensor:
        return self._apply(x, layer, partial(self._own, dim, widths), partial(self._join, dim, widths))

    def own_errors(self, x: Tensor, layer: str, dim: int, widths: Widths) -> Tensor:
        return self._apply(x, layer, _same, partial(self._padded_sum, dim, widths))

    def rows(self, x: Tensor, layer: str, widths: Widths) -> Tensor:
        """The rows of all members, joined; going back, the sum of the errors of the own rows."""
        return self._apply(x, layer, partial(self._join, 0, widths), partial(self._sum_of_own, 0, widths))

    def _apply(self, x: Tensor, layer: str, there: Op, back: Op) -> Tensor:
        number = self._calls[layer]
        self._calls[layer] += 1
        forward, backward = (
            partial(self._called, (layer, direction, number), op)
            for direction, op in (("forward", there), ("backward", back))
        )
        found: Tensor = Exchange.apply(x, forward, backward)  # type: ignore[no-untyped-call]
        return found

    def _called(self, call: Call, op: Op, x: Tensor) -> Tensor:
        if op is _same or (isinstance(op, partial) and op.func == self._own):
            return op(x)
        return self._asks.ask(partial(self._in_call, call, op, x.detach()))

    def _in_call(self, call: Call, op: Op, x: Tensor) -> Tensor:
        before, self.members.call = self.members.call, call
        try:
            with torch.no_grad():
                return op(x)
        finally:
            self.members.call = before

    # -- one direction ----------------------------------------------------------------------------

    def _sum(self, x: Tensor) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        self._collective.all_reduce(total.view(-1))
        return total

    def _own(self, dim: int, widths: Widths, x: Tensor) -> Tensor:
        return x.narrow(dim, sum(widths[: self.index]), widths[self.index]).contiguous()

    def _join(self, dim: int, widths: Widths, x: Tensor) -> Tensor:
        """The slices of all members along a dimension."""
        mine = x.movedim(dim, 0).contiguous()
        whole = mine.new_empty(sum(widths), *mine.shape[1:])
        self._to_all([mine.view(-1)] * self.size, [piece.view(-1) for piece in torch.split(whole, list(widths))])
        return whole.movedim(0, dim).contiguous()

    def _sum_of_own(self, dim: int, widths: Widths, x: Tensor) -> Tensor:
        """The sum over all members of the own slice, in the order of the members."""
        pieces = [piece.contiguous().view(-1) for piece in torch.split(x.movedim(dim, 0), list(widths))]
        own = pieces[self.index]
        found = own.new_empty(self.size, own.numel())
        self._to_all(pieces, list(found.unbind()))
        others = x.movedim(dim, 0).shape[1:]
        return _added(found).view(widths[self.index], *others).movedim(0, dim).contiguous()

    def _padded_sum(self, dim: int, widths: Widths, x: Tensor) -> Tensor:
        padded = torch.zeros_like(x, memory_format=torch.contiguous_format)
        padded.narrow(dim, sum(widths[: self.index]), widths[self.index]).copy_(self._sum_of_own(dim, widths, x))
        return padded

    def _to_all(self, xs: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        self._collective.all_to_all(xs, outs)

    # -- outside of passes ------------------------------------------------------------------------

    def share(self, mine: Tensor, outs: Sequence[Tensor], name: str) -> None:
        """Give a vector to all members, and get theirs; some may be empty."""
        self._in_call((name, "forward", 0), lambda x: self._shared(x, outs), mine)

    def _shared(self, mine: Tensor, outs: Sequence[Tensor]) -> Tensor:
        self._to_all([mine] * self.size, outs)
        return mine

    def sum_own(self, xs: Sequence[Tensor], name: str) -> Tensor:
        """Of vectors for each member, the sum of those for this one, in the order of the members."""
        found = xs[self.index].new_empty(self.size, xs[self.index].numel())
        outs = list(found.unbind())

        def exchanged(own: Tensor) -> Tensor:
            self._to_all(xs, outs)
            return own

        self._in_call((name, "backward", 0), exchanged, xs[self.index])
        return _added(found)


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


def _added(rows: Tensor) -> Tensor:
    """The sum of rows, the first one first: the same bits wherever it is computed."""
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total
