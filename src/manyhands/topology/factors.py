"""Factors: two thin matrices that make up the gradient of a linear layer.

    y = h W^T + b       h      K x N     what goes in: a row per sample (and position, and call of this step)
                        delta  K x M     dL/dy, as many rows

    dL/dW = delta^T h        M x N       dL/db = the sum of the rows of delta

                K                             N
              +---+               +-----------------------+            +-----------------------+
            M |   |      x      K |           h           |     =    M |         dL/dW         |
              +---+               +-----------------------+            +-----------------------+
             delta^T

h is seen when the layer is called, delta in the backward pass. That the layer's parameters get nothing from elsewhere
cannot be seen so; it is checked in every step against the gradient G that autograd has found:

    G v = delta^T (h v)                  v: one random direction, so this is two thin products and a look at G
    |difference|_i <= 4 eps sqrt(N + K) |delta_i| |h|       what rounding can do; norms of a column, of the whole

A term of the loss that uses the weights past the layer, a layer whose output is not its own, half precision under
autocast: then there are no factors. Layers of half precision have none, since rounding could hide such a term.

Reference: P. Xie et al., "Distributed machine learning via sufficient factor broadcasting", 2015,
https://arxiv.org/abs/1511.08486; the check: R. Freivalds, "Probabilistic machines can use less running time", 1977.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from manyhands.core.flat import Flat, Part, Place

ROUNDING = 4
"""By how many times the precision of a number, times the root of how many there are, two ways of summing may differ."""

Pair = tuple[Tensor, Tensor]
"""delta and h."""


class Layer:
    """One linear layer on one rank. A copy of the model has its own, which sees nothing.

    Args:
        module: the layer.
        weight: where its weight lies.
        bias: where its bias lies, if it has one that is trained.
    """

    def __init__(self, module: nn.Linear, weight: Place, bias: Place | None) -> None:
        self.module = module
        self.weight = weight
        self.bias = bias
        self.M, self.N = weight.shape
        direction = torch.randn(self.N, generator=torch.Generator().manual_seed(0), dtype=module.weight.dtype)
        self._v = direction.to(module.weight.device)
        self._pairs: list[Pair] = []
        self._is_open = False

    @property
    def name(self) -> str:
        """Of its weight."""
        return self.weight.name

    @property
    def places(self) -> list[Place]:
        """Its parameters."""
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    def watch(self) -> RemovableHandle:
        """See from now on what goes in, and what comes back."""
        return self.module.register_forward_hook(self._called, with_kwargs=True)

    def _called(self, _: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], y: Any) -> None:
        h = args[0] if args else kwargs.get("input")
        if not (self._is_open and isinstance(h, Tensor) and isinstance(y, Tensor) and y.requires_grad):
            return
        if h.shape[-1:] == (self.N,) and y.shape == (*h.shape[:-1], self.M):
            h = h.detach()

            def keep(delta: Tensor) -> None:
                self._pairs.append((delta.detach(), h))

            y.register_hook(keep)  # type: ignore[no-untyped-call]

    # -- one step ---------------------------------------------------------------------------------

    def open(self) -> None:
        """Begin a step."""
        self._pairs = []
        self._is_open = True

    def take(self, flat: Flat) -> Pair | None:
        """This step's factors, which may be lent; None if the gradient of this rank is not made up of them."""
        pairs, self._pairs, self._is_open = self._pairs, [], False
        if any(x.dtype != self._v.dtype for pair in pairs for x in pair):
            return None
        delta = self._rows([delta for delta, _ in pairs], self.M)
        h = self._rows([h for _, h in pairs], self.N)
        return (delta, h) if self._explains(flat, delta, h) else None

    def _rows(self, tensors: Sequence[Tensor], width: int) -> Tensor:
        rows = [x.reshape(x.numel() // width, width) for x in tensors]
        return rows[0].contiguous() if len(rows) == 1 else torch.cat([self._v.new_empty(0, width), *rows])

    def _explains(self, flat: Flat, delta: Tensor, h: Tensor) -> bool:
        eps = ROUNDING * torch.finfo(delta.dtype).eps * (self.N + len(h)) ** 0.5
        off = flat.gradient_of(self.weight) @ self._v - delta.T @ (h @ self._v)
        most = eps * delta.norm(dim=0, dtype=torch.float64) * h.norm(dtype=torch.float64)
        explained = bool((off.abs() <= most).all())
        if explained and self.bias is not None:
            off = flat.gradient_of(self.bias) - delta.sum(0)
            explained = bool((off.abs() <= eps * delta.abs().sum(0)).all())
        return explained

    def sizes(self, rows: int) -> Pair:
        """Factors of so many rows, of which there are only sizes."""
        return self._v.new_empty(rows, self.M), self._v.new_empty(rows, self.N)

    def fits(self, delta: Tensor, h: Tensor, rows: int) -> bool:
        """Whether these can be this layer's factors on another rank."""
        shapes = tuple(delta.shape) == (rows, self.M) and tuple(h.shape) == (rows, self.N)
        return shapes and delta.dtype == h.dtype == self._v.dtype

    def rebuild(self, flat: Flat, delta: Tensor, h: Tensor) -> None:
        """Put the gradient in its place."""
        torch.mm(delta.T, h, out=flat.gradient_of(self.weight))
        if self.bias is not None:
            torch.sum(delta, 0, out=flat.gradient_of(self.bias))


def find_layers(model: nn.Module, flat: Flat) -> list[Layer]:
    """The linear layers of a model that may have factors: trained ones, whose parameters are nobody else's."""
    places = {place.name: place for place in flat.places}
    trained = {id(p): places[name] for name, p in model.named_parameters() if name in places}
    users = Counter(id(p) for module in model.modules() for p in module._parameters.values())
    found = []
    for module in model.modules():
        own = dict(module.named_parameters(recurse=False))
        if isinstance(module, nn.Linear) and id(own.get("weight")) in trained:
            weight, bias = own["weight"], own.get("bias")
            alone = users[id(weight)] == 1 and (bias is None or (users[id(bias)], bias.dtype) == (1, weight.dtype))
            if alone and weight.dtype in (torch.float32, torch.float64) and weight.numel():
                found.append(Layer(module, trained[id(weight)], trained.get(id(bias))))
    return found


def left(part: Part, taken: Collection[Place]) -> list[slice]:
    """Which stretches of a part's gradient and marks are left without some parameters."""
    cuts, start = [], 0
    for place in part.places:
        if place in taken:
            cuts.append(slice(start, place.span.start))
            start = place.span.stop
    cuts.append(slice(start, part.outgoing.numel()))
    return [cut for cut in cuts if cut.start < cut.stop]
