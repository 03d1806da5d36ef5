"""Stage: forward and backward pass of a part of the model, with weights chosen by the caller.

Weights other than the current ones are passed in as leaves (`torch.func.functional_call`), so that an update between
the two passes does not invalidate the graph, and the backward pass does not use newer weights by mistake.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call

from manyhands.core.worker import Worker


class Stage:
    """The part of the model that one worker of a pipeline runs."""

    def __init__(self, w: Worker, module: nn.Module) -> None:
        self._w = w
        self._module = module
        parameters = dict(w.model.named_parameters())
        own = {id(p): name for name, p in module.named_parameters()}
        self._names = [own[id(parameters[slot.name])] for slot in w.flat.slots]
        self.live: list[Tensor] = [parameters[slot.name] for slot in w.flat.slots]
        """The current parameters of the stage, in the order of the flat model."""
        self._share = w.share_of(module)
        self._saved: dict[int, tuple[Tensor, Tensor, list[Tensor]]] = {}

    def forward(
        self, m: int, x: Tensor, weights: list[Tensor], loss: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """Run micro-batch `m`; its graph is kept until `backward(m)`. The output, or the loss if one is given."""
        x = x.detach().requires_grad_() if x.is_floating_point() else x
        with self._w.timer.computing():
            with torch.enable_grad():
                out = self._run(x, weights)
                out = out if loss is None else loss(out)
            self._saved[m] = x, out, weights
            self._w.charge_passes(len(x), self._share.forward)
        return out.detach()

    def _run(self, x: Tensor, weights: list[Tensor]) -> Tensor:
        if weights is self.live:
            out: Tensor = self._module(x)
        else:
            out = functional_call(self._module, dict(zip(self._names, weights, strict=True)), (x,))
        return out

    def backward(self, m: int, error: Tensor) -> Tensor | None:
        """Back-propagate `error` through micro-batch `m` into the flat gradient; the error for the previous stage."""
        x, out, weights = self._saved.pop(m)
        inputs = [*weights, x] if x.requires_grad else weights
        if not inputs:  # neither this stage nor a previous one is trained
            return None
        with self._w.timer.computing():
            grads = torch.autograd.grad(out, inputs, error, allow_unused=True)
            for slot, g in zip(self._w.flat.slots, grads, strict=False):
                if g is not None:
                    self._w.flat.put(slot, g)
            self._w.charge_passes(len(x), self._share.backward)
        return grads[-1] if x.requires_grad else None
