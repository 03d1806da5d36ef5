"""Weight products: the gradients of the weights of linear layers and convolutions, computed apart from the errors.

    y = x W^T          dx = delta W           in the backward pass
                       dW = delta^T x         at once, added to the flat gradient by the product itself; or later

Autograd makes a new tensor for the gradient of each pass, which is then added. Here a linear layer's product adds to
the flat gradient: for a large weight and few rows that saves most of the memory traffic. A pass that is divided into
two halves (zero bubble) keeps x and delta between them.

Within a pass the layers of a stage have another `forward`, also while autograd runs: a checkpoint inside the module
computes them again there. Products are taken in the backward pass of the stage only: gradients that a module computes
in its forward pass are torch's. Left to autograd are weights that a hook watches, derived ones (weight norm), autocast,
what is not a plain `nn.Linear` or `nn.Conv2d`, and linear layers with small weights, for which an autograd function in
Python takes longer than it saves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional

from manyhands.core.flat import Flat, ParamSlot

LARGE = 2**19
"""Elements of a weight from which its product is added to the flat gradient at once."""
Slots = tuple[ParamSlot, ParamSlot | None]
"""Of a layer's weight and of its bias, if that is trained."""


class Shape(NamedTuple):
    """How a convolution moves over its input."""

    stride: Any
    padding: Any
    dilation: Any
    groups: int


Products = list[partial[None]]
"""Products that were put off; their last arguments are an error, an input and a weight."""
Weigh = Callable[[Tensor, Tensor, Tensor], bool]
"""Takes the error of a layer's output, its input and its weight; whether it has taken them."""


class Context(Protocol):
    """What autograd hands from the forward to the backward pass of a function."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    weigh: Weigh
    shape: Shape

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class Linear(torch.autograd.Function):
    """A linear layer that hands on what the gradients of its parameters need.

    Where they are not taken, because a module computes gradients in its forward pass, it is like torch's.
    """

    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, bias: Tensor | None, weigh: Weigh) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weigh = weigh
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Context, delta: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        error = delta.matmul(weight) if ctx.needs_input_grad[0] else None
        if ctx.weigh(delta, x, weight):
            return error, None, None, None
        rows = delta.reshape(-1, delta.shape[-1])
        return error, rows.t() @ x.reshape(-1, x.shape[-1]), rows.sum(0) if ctx.needs_input_grad[2] else None, None


class Convolution(torch.autograd.Function):
    """The same for a convolution."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, bias: Tensor | None, shape: Shape, weigh: Weigh) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weigh, ctx.shape = weigh, shape
        return functional.conv2d(x, weight, bias, *shape)

    @staticmethod
    def backward(ctx: Context, delta: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_error = ctx.needs_input_grad[0]
        if ctx.weigh(delta, x, weight):
            error = _convolved(delta, x, weight, ctx.shape, (True, False))[0] if needs_error else None
            return error, None, None, None, None
        error, own = _convolved(delta, x, weight, ctx.shape, (needs_error, True))
        return error, own, delta.sum((0, 2, 3)) if ctx.needs_input_grad[2] else None, None, None


def _convolved(delta: Tensor, x: Tensor, weight: Tensor, shape: Shape, wanted: tuple[bool, bool]) -> Sequence[Tensor]:
    """The gradients of a convolution: of its input, of its weight."""
    found: Sequence[Tensor] = torch.ops.aten.convolution_backward(
        delta, x, weight, None, *shape[:3], False, [0, 0], shape.groups, [*wanted, False]
    )
    return found[:2]


def layers_apart(module: nn.Module, *, splits: bool) -> list[nn.Linear | nn.Conv2d]:
    """The layers of a module whose weights' gradients are worth computing apart, or can be, if the pass is split."""
    plain = (one for one in module.modules() if "forward" not in vars(one) and "weight" in one._parameters)
    return [layer for layer in plain if _is_large_linear(layer, splits) or (splits and _is_convolution(layer))]


def _is_large_linear(layer: nn.Module, splits: bool) -> TypeGuard[nn.Linear]:
    if not isinstance(layer, nn.Linear) or type(layer).forward is not nn.Linear.forward:
        return False
    return splits or layer.weight.numel() >= LARGE


def _is_convolution(layer: nn.Module) -> TypeGuard[nn.Conv2d]:
    is_plain = isinstance(layer, nn.Conv2d) and type(layer).forward is nn.Conv2d.forward
    return is_plain and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)


class WeightProducts:
    """Within it, layers compute the gradients of their weights apart.

    Args:
        flat: where the gradients are put.
        layers: those of `layers_apart`.
        weights: the tensors that the pass uses as weights, by id, with their slots.
        later: collects the products of this pass, to be computed by `weigh`; None: they are computed at once.
    """

    def __init__(
        self,
        flat: Flat,
        layers: Sequence[nn.Linear | nn.Conv2d],
        weights: Mapping[int, ParamSlot],
        later: Products | None,
    ) -> None:
        self._flat, self._layers, self._slots, self._later = flat, layers, weights, later

        self._propagates = False

    def __enter__(self) -> None:
        for layer in self._layers:
            vars(layer)["forward"] = partial(self._forward, layer)

    def __exit__(self, *_: object) -> None:
        for layer in self._layers:
            del vars(layer)["forward"]

    @contextmanager
    def propagating(self) -> Iterator[None]:
        """Within it the stage's own backward pass runs, whose products are taken."""
        self._propagates = True
        try:
            with self:
                yield
        finally:
            self._propagates = False

    def _forward(self, layer: nn.Linear | nn.Conv2d, x: Tensor) -> Tensor:
        """The output of a layer."""
        slots = self._slots_of(x, layer.weight, layer.bias)
        if slots is None or (isinstance(layer, nn.Conv2d) and x.dim() != 4):
            out: Tensor = type(layer).forward(layer, x)  # type: ignore[arg-type]
        elif isinstance(layer, nn.Linear):
            linear = self._weigh_in(partial(_weigh_linear, self._flat, slots))
            out = Linear.apply(x, layer.weight, layer.bias, linear)  # type: ignore[no-untyped-call]
        else:
            shape = Shape(layer.stride, layer.padding, layer.dilation, layer.groups)
            convolution = self._weigh_in(partial(_weigh_convolution, self._flat, slots, shape))
            out = Convolution.apply(x, layer.weight, layer.bias, shape, convolution)  # type: ignore[no-untyped-call]
        return out

    def _slots_of(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Slots | None:
        """The slots of a layer's parameters; None if the layer is left to autograd."""
        slot = self._slots.get(id(weight))
        if slot is None or weight._backward_hooks or torch.is_autocast_enabled(x.device.type):
            return None
        if bias is None or not bias.requires_grad:
            return slot, None
        other = self._slots.get(id(bias))
        return None if other is None or bias._backward_hooks else (slot, other)

    def _weigh_in(self, product: Callable[[Tensor, Tensor, Tensor], None]) -> Weigh:
        """For a layer that runs now. In the stage's own backward pass it runs only to be recomputed by a checkpoint."""
        is_recomputed = self._propagates

        def weigh(delta: Tensor, x: Tensor, weight: Tensor) -> bool:
            if is_recomputed or not self._propagates:
                return False
            if self._later is None:
                product(delta, x, weight)
            else:
                self._later.append(partial(product, delta, x, weight))
            return True

        return weigh


def _weigh_linear(flat: Flat, slots: Slots, delta: Tensor, x: Tensor, _: Tensor) -> None:
    delta, x = delta.reshape(-1, delta.shape[-1]), x.reshape(-1, x.shape[-1])
    flat.put_product(slots[0], delta.t(), x)
    if slots[1] is not None:
        flat.put(slots[1], delta.sum(0))


def _weigh_convolution(flat: Flat, slots: Slots, shape: Shape, delta: Tensor, x: Tensor, weight: Tensor) -> None:
    flat.put(slots[0], _convolved(delta, x, weight, shape, (False, True))[1])
    if slots[1] is not None:
        flat.put(slots[1], delta.sum((0, 2, 3)))


@torch.no_grad()
def weigh(products: Products) -> None:
    """Compute the products that were put off."""
    for product in products:
        product()
    products.clear()
