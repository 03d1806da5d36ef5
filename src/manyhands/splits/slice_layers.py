"""Slice layers: the forward passes of layers of which each member of a team has a slice.

    enter      the input: whole (its errors are summed going back), the own slice, or cut to it
    product    with the slice of the weight
    leave      the slices are gathered, kept apart, or summed; a bias is added once, after the sum

Between a layer whose slices are kept apart and the next sum, random numbers (dropout) are each member's own: seeded by
a number that all draw alike, and by the member. Elsewhere all draw alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from manyhands.core.port import even_spans
from manyhands.splits.slice_attention import attention
from manyhands.splits.slice_exchange import SliceExchange
from manyhands.splits.slice_plan import SlicedLayer

CHANNELS, FEATURES = -3, -1
"""The dimension of the output that is divided: of a convolution, of other layers."""


class SliceLayers:
    """Within it the layers of a plan compute with slices.

    Args:
        layers: the plan.
        exchange: connects the members.
    """

    def __init__(self, layers: Sequence[SlicedLayer], exchange: SliceExchange) -> None:
        self._layers, self._exchange = layers, exchange
        self._shared_random: Tensor | None = None

    def __enter__(self) -> None:
        self._exchange.begin()
        self._shared_random = None
        for one in self._layers:
            vars(one.layer)["forward"] = (
                partial(attention, self, one) if one.way == "heads" else partial(self._run, one)
            )

    def __exit__(self, *_: object) -> None:
        for one in self._layers:
            del vars(one.layer)["forward"]

    def _run(self, one: SlicedLayer, x: Tensor) -> Tensor:
        layer = one.layer
        bias: Tensor | None = getattr(layer, "bias", None)
        y = PRODUCTS[type_of(layer)](self, one, self.enter(one, x), bias if one.way == "out" else None)
        y = self.leave(one, y)
        if bias is None or one.way == "out":
            return y
        return y + (bias.view(-1, 1, 1) if isinstance(layer, nn.Conv2d) else bias)

    def enter(self, one: SlicedLayer, x: Tensor) -> Tensor:
        """What the layer's slice is multiplied with."""
        if one.takes in ("slice", "partial") or not x.is_floating_point():
            return x
        dim = _dim(one.layer)
        if one.way == "in":
            return self._exchange.scatter(x, one.name, dim, one.widths)
        if one.takes == "own errors":
            widths = [span.stop - span.start for span in even_spans(x.shape[dim], one.size)]
            return self._exchange.own_errors(x, one.name, dim, widths)
        return self._exchange.copy(x, one.name)

    def leave(self, one: SlicedLayer, y: Tensor) -> Tensor:
        """The output, of the slices of all members."""
        if one.joins == "keep":
            self.random_apart()
            return y
        self.random_together()
        if one.joins == "sum":
            return self._exchange.sum(y, one.name)
        return self._exchange.gather(y, one.name, _dim(one.layer), one.widths)

    @property
    def index(self) -> int:
        return self._exchange.index

    def total(self, one: SlicedLayer, y: Tensor) -> Tensor:
        """The sum over the members of something else that this layer computes."""
        return self._exchange.sum(y, one.name)

    def random_apart(self) -> None:
        """From now on random numbers are this member's own."""
        if self._shared_random is None:
            seed = int(torch.randint(2**62, ()))
            self._shared_random = torch.default_generator.get_state()
            torch.default_generator.manual_seed(seed + self.index)

    def random_together(self) -> None:
        """From now on all members draw alike."""
        if self._shared_random is not None:
            torch.default_generator.set_state(self._shared_random)
            self._shared_random = None


def _dim(layer: nn.Module) -> int:
    return CHANNELS if isinstance(layer, nn.Conv2d) else FEATURES


def type_of(layer: nn.Module) -> type[nn.Module]:
    return next(kind for kind in PRODUCTS if isinstance(layer, kind))


# -- products ------------------------------------------------------------------------------------------


def _linear(_: SliceLayers, one: SlicedLayer, x: Tensor, bias: Tensor | None) -> Tensor:
    return functional.linear(x, one.layer.get_parameter("weight"), bias)


def _convolution(_: SliceLayers, one: SlicedLayer, x: Tensor, bias: Tensor | None) -> Tensor:
    assert isinstance(one.layer, nn.Conv2d)
    found: Tensor = one.layer._conv_forward(x, one.layer.weight, bias)
    return found


def _embedding(run: SliceLayers, one: SlicedLayer, words: Tensor, _: Tensor | None) -> Tensor:
    """Of each word the own columns; or the own words, and zeros for others."""
    layer = one.layer
    assert isinstance(layer, nn.Embedding)
    if one.way == "out":
        return functional.embedding(words, layer.weight, layer.padding_idx)
    first = sum(one.widths[: run.index])
    inside = (words >= first) & (words < first + one.widths[run.index])
    padding = layer.padding_idx
    if padding is not None:
        inside &= words != padding
    found = functional.embedding(torch.where(inside, words - first, 0), layer.weight) * inside.unsqueeze(-1)
    if padding is not None and first <= padding < first + one.widths[run.index]:
        found = found + (words == padding).unsqueeze(-1) * layer.weight[padding - first].detach()
    result: Tensor = found
    return result


PRODUCTS: Mapping[type[nn.Module], Callable[..., Tensor]] = {
    nn.Linear: _linear,
    nn.Conv2d: _convolution,
    nn.Embedding: _embedding,
}
