"""Stage: forward and backward of a part of the model, with weights chosen by the caller.

Weights other than the live ones are given as leaves (`torch.func.functional_call`), so that an update
between the two passes neither disturbs autograd nor slips unseen into the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call

from manyhands.core.worker import FORWARD_SHARE, Worker


class Stage:
    """One stage of a pipeline on its worker."""

    def __init__(self, w: Worker, module: nn.Module) -> None:
        self._w = w
        self._module = module
        parameters = dict(w.model.named_parameters())
        own = {id(p): name for name, p in module.named_parameters()}
        self._names = [own[id(parameters[place.name])] for place in w.flat.places]
        self.live: list[Tensor] = [parameters[place.name] for place in w.flat.places]
        """The model's own weights, parameter by parameter."""
        self._size = sum(p.numel() for p in module.parameters())
        self._saved: dict[int, tuple[Tensor, Tensor, list[Tensor]]] = {}

    def forward(
        self, m: int, x: Tensor, weights: list[Tensor], loss: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """Run micro-batch `m`; the output (or the loss) stays known until `backward(m)`."""
        x = x.detach().requires_grad_() if x.is_floating_point() else x
        self._w.seed_torch(self._w.rank, self._w.step, m)
        with self._w.spent.computing():
            with torch.enable_grad():
                out = self._run(x, weights)
                out = out if loss is None else loss(out)
            self._saved[m] = x, out, weights
            self._w.transport.spend(self._w.seconds(len(x), self._size) * FORWARD_SHARE)
        return out.detach()

    def _run(self, x: Tensor, weights: list[Tensor]) -> Tensor:
        if weights is self.live:
            out: Tensor = self._module(x)
        else:
            out = functional_call(self._module, dict(zip(self._names, weights, strict=True)), (x,))
        return out

    def backward(self, m: int, error: Tensor) -> Tensor | None:
        """Back-propagate `error` through micro-batch `m` into the flat gradient; the error for the stage below."""
        x, out, weights = self._saved.pop(m)
        inputs = [*weights, x] if x.requires_grad else weights
        if not inputs:  # frozen, and nothing below it learns either
            return None
        with self._w.spent.computing():
            grads = torch.autograd.grad(out, inputs, error, allow_unused=True)
            for place, g in zip(self._w.flat.places, grads, strict=False):
                if g is not None:
                    self._w.flat.put(place, g)
            self._w.transport.spend(self._w.seconds(len(x), self._size) * (1 - FORWARD_SHARE))
        return grads[-1] if x.requires_grad else None
