"""Factors: the two thin matrices whose product is the gradient of a linear layer.

    y = h W^T + b       h      K x N     the input: a row per sample (and position, and call in this step)
                        delta  K x M     dL/dy, as many rows

    dL/dW = delta^T h        M x N       dL/db = the sum of the rows of delta

                K                             N
              +---+               +-----------------------+            +-----------------------+
            M |   |      x      K |           h           |     =    M |         dL/dW         |
              +---+               +-----------------------+            +-----------------------+
             delta^T

A hook records h when the layer is called, and delta in the backward pass. It does not see gradients that reach the
parameters on other paths, so the factors are checked in every step against the gradient G that autograd has computed:

    G v = delta^T (h v)                  v: one random direction, so this is two thin products and one pass over G
    |difference|_i <= 4 eps sqrt(N + K) |delta_i| |h|       bound of rounding errors; norms of a column, of all of h

The factors are not valid if a term of the loss uses the weights outside of the layer, if a hook replaces the layer's
output, or under autocast. Layers of half precision have none, because rounding could hide such a term.

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

from manyhands.core.flat import DtypeGroup, Flat, ParamSlot
from manyhands.core.vector_ops import VectorOps

ROUNDING = 4
"""How far two ways of summing n numbers may differ, in units of the machine epsilon times sqrt(n)."""

Pair = tuple[Tensor, Tensor]
"""delta and h."""


class Layer:
    """One linear layer on one rank. The hooks of a copy of the model record nothing.

    Args:
        module: the layer.
        weight: the slot of its weight.
        bias: the slot of its bias, if it has one that is trained.
    """

    def __init__(self, module: nn.Linear, weight: ParamSlot, bias: ParamSlot | None) -> None:
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
        """The name of its weight, which identifies the layer."""
        return self.weight.name

    @property
    def slots(self) -> list[ParamSlot]:
        """The slots of its parameters."""
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    def watch(self) -> RemovableHandle:
        """Record inputs and output gradients from now on."""
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
        """Start to record a step."""
        self._pairs = []
        self._is_open = True

    def take(self, ops: VectorOps, flat: Flat, samples: int) -> Pair | None:
        """This step's factors, in memory that may be sent; None if their product is not this rank's gradient.

        Of sizes only, those of as many rows as samples. The check reads the gradient once.
        """
        if not ops.computes(flat.gradient_of(self.weight)):
            return self.sizes(samples)
        pairs, self._pairs, self._is_open = self._pairs, [], False
        if any(x.dtype != self._v.dtype for pair in pairs for x in pair):
            return None
        delta = self._rows([delta for delta, _ in pairs], self.M)
        h = self._rows([h for _, h in pairs], self.N)
        return (delta, h) if self._are_valid(flat, delta, h) else None

    def _rows(self, tensors: Sequence[Tensor], width: int) -> Tensor:
        rows = [x.reshape(x.numel() // width, width) for x in tensors]
        return rows[0].contiguous() if len(rows) == 1 else torch.cat([self._v.new_empty(0, width), *rows])

    def _are_valid(self, flat: Flat, delta: Tensor, h: Tensor) -> bool:
        """The check of the module's docstring."""
        eps = ROUNDING * torch.finfo(delta.dtype).eps * (self.N + len(h)) ** 0.5
        off = flat.gradient_of(self.weight) @ self._v - delta.T @ (h @ self._v)
        most = eps * delta.norm(dim=0, dtype=torch.float64) * h.norm(dtype=torch.float64)
        valid = bool((off.abs() <= most).all())
        if valid and self.bias is not None:
            off = flat.gradient_of(self.bias) - delta.sum(0)
            valid = bool((off.abs() <= eps * delta.abs().sum(0)).all())
        return valid

    def sizes(self, rows: int) -> Pair:
        """Uninitialised factors with that many rows."""
        return self._v.new_empty(rows, self.M), self._v.new_empty(rows, self.N)

    def fits(self, delta: Tensor, h: Tensor, rows: int) -> bool:
        """Whether these have the shapes and the dtype of this layer's factors."""
        shapes = tuple(delta.shape) == (rows, self.M) and tuple(h.shape) == (rows, self.N)
        return shapes and delta.dtype == h.dtype == self._v.dtype

    def rebuild(self, ops: VectorOps, flat: Flat, delta: Tensor, h: Tensor) -> None:
        """Write the product into the flat gradient."""
        ops.product(delta.T, h, out=flat.gradient_of(self.weight))
        if self.bias is not None:
            torch.sum(delta, 0, out=flat.gradient_of(self.bias))


def find_layers(model: nn.Module, flat: Flat) -> list[Layer]:
    """The linear layers of a model that may have factors: trained ones that share no parameter with other modules."""
    slots = {slot.name: slot for slot in flat.slots}
    trained = {id(p): slots[name] for name, p in model.named_parameters() if name in slots}
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


def left(group: DtypeGroup, taken: Collection[ParamSlot]) -> list[slice]:
    """The parts of a dtype group's gradient and touch counts without the parameters `taken`."""
    cuts, start = [], 0
    for slot in group.slots:
        if slot in taken:
            cuts.append(slice(start, slot.span.start))
            start = slot.span.stop
    cuts.append(slice(start, group.outgoing.numel()))
    return [cut for cut in cuts if cut.start < cut.stop]
