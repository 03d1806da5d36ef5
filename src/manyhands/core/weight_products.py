"""Weight products: the gradients of the weights of linear layers and convolutions, computed apart from the errors.

    y = x W^T          dx = delta W           in the backward pass
                       dW = delta^T x         at once, added to the flat gradient by the product itself; or later

Autograd makes a new tensor for the gradient of each pass, which is then added. Here a linear layer's product adds to
the flat gradient: for a large weight and few rows that saves most of the memory traffic. A pass that is divided into
two halves (zero bubble) keeps x and delta between them.

Within a pass the two functions of torch are intercepted, so any module that calls them with a parameter of the stage is
covered. Left to autograd are weights that a hook watches, derived ones (weight norm), autocast, and linear layers with
small weights, for which an autograd function in Python takes longer than it saves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from manyhands.core.flat import Flat, ParamSlot

LARGE = 2**18
"""Elements of a weight from which its product is added to the flat gradient at once."""
Slots = tuple[ParamSlot, ParamSlot | None]
"""Of a layer's weight and of its bias, if that is trained."""
Weigh = Callable[[Tensor, Tensor, Tensor], None]
"""Takes the error of a layer's output, its input and its weight."""


class Context(Protocol):
    """What autograd hands from the forward to the backward pass of a function."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    weigh: Weigh
    shape: tuple[Any, ...]

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class Linear(torch.autograd.Function):
    """A linear layer whose backward pass computes the error of its input, and hands on what the weights need."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, bias: Tensor | None, weigh: Weigh) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weigh = weigh
        return functional.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, delta: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        ctx.weigh(delta, x, weight)
        return (delta.matmul(weight) if ctx.needs_input_grad[0] else None), None, None, None


class Convolution(torch.autograd.Function):
    """The same for a convolution; `shape` is its stride, padding, dilation and groups."""

    @staticmethod
    def forward(
        ctx: Context, x: Tensor, weight: Tensor, bias: Tensor | None, shape: tuple[Any, ...], weigh: Weigh
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weigh, ctx.shape = weigh, shape
        return functional.conv2d(x, weight, bias, *shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, delta: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        ctx.weigh(delta, x, weight)
        error = _convolved(delta, x, weight, ctx.shape, (True, False))[0] if ctx.needs_input_grad[0] else None
        return error, None, None, None, None


def _convolved(
    delta: Tensor, x: Tensor, weight: Tensor, shape: tuple[Any, ...], wanted: tuple[bool, bool]
) -> Sequence[Tensor]:
    """The gradients of a convolution: of its input, of its weight."""
    stride, padding, dilation, groups = shape
    sizes = [[n] * 2 if isinstance(n, int) else list(n) for n in (stride, padding, dilation)]
    found: Sequence[Tensor] = torch.ops.aten.convolution_backward(
        delta, x, weight, None, *sizes, False, [0, 0], groups, [*wanted, False]
    )
    return found


class WeightProducts(TorchFunctionMode):
    """Within it, the layers of one stage compute the gradients of their weights apart.

    Args:
        flat: where the gradients are put.
        weights: the tensors that the pass uses as weights, with their slots.
        later: collects the products of this pass, to be computed by `weigh`; None: they are computed at once.
    """

    def __init__(self, flat: Flat, weights: Mapping[int, ParamSlot], later: list[Callable[[], None]] | None) -> None:
        super().__init__()
        self._flat, self._slots, self._later = flat, weights, later

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if (func is functional.linear or func is functional.conv2d) and not kwargs:
            slots = self._slots_of(*args[:3])
            if slots is not None:
                return self._linear(slots, *args) if func is functional.linear else self._convolution(slots, *args)
        return func(*args, **(kwargs or {}))

    def _slots_of(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Slots | None:
        """The slots of a layer's parameters; None if the layer is left to autograd."""
        slot = self._slots.get(id(weight))
        if slot is None or weight._backward_hooks or torch.is_autocast_enabled(x.device.type):
            return None
        if bias is None or not bias.requires_grad:
            return slot, None
        other = self._slots.get(id(bias))
        return None if other is None or bias._backward_hooks else (slot, other)

    def _linear(self, slots: Slots, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        if self._later is None and weight.numel() < LARGE:
            return functional.linear(x, weight, bias)
        weigh = partial(self._weigh, partial(_weigh_linear, self._flat, slots))
        return Linear.apply(x, weight, bias, weigh)  # type: ignore[no-untyped-call]

    def _convolution(
        self,
        slots: Slots,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Any:
        shape = stride, padding, dilation, groups
        if self._later is None or isinstance(padding, str) or x.dim() != 4:
            return functional.conv2d(x, weight, bias, *shape)
        weigh = partial(self._weigh, partial(_weigh_convolution, self._flat, slots, shape))
        return Convolution.apply(x, weight, bias, shape, weigh)  # type: ignore[no-untyped-call]

    def _weigh(self, product: Weigh, delta: Tensor, x: Tensor, weight: Tensor) -> None:
        """Compute a product now or note it for later."""
        if self._later is None:
            product(delta, x, weight)
        else:
            self._later.append(partial(product, delta, x, weight))


def _weigh_linear(flat: Flat, slots: Slots, delta: Tensor, x: Tensor, _: Tensor) -> None:
    delta, x = delta.reshape(-1, delta.shape[-1]), x.reshape(-1, x.shape[-1])
    flat.put_product(slots[0], delta.t(), x)
    if slots[1] is not None:
        flat.put(slots[1], delta.sum(0))


def _weigh_convolution(
    flat: Flat, slots: Slots, shape: tuple[Any, ...], delta: Tensor, x: Tensor, weight: Tensor
) -> None:
    flat.put(slots[0], _convolved(delta, x, weight, shape, (False, True))[1])
    if slots[1] is not None:
        flat.put(slots[1], delta.sum((0, 2, 3)))


@torch.no_grad()
def weigh(products: list[Callable[[], None]]) -> None:
    """Compute the products that were put off."""
    for product in products:
        product()
    products.clear()
