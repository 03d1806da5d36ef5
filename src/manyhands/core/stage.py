"""Stage: forward and backward pass of a part of the model, with weights chosen by the caller.

    keeps    F(m)                          B(m)
    graph    runs, and keeps its graph     back-propagates through it
    inputs   runs without a graph          runs again, with the weights as they are then, and back-propagates

The second run has the same random numbers as the first (dropout), and does not change buffers again (BatchNorm).

Weights other than the current ones are passed in as leaves (`torch.func.functional_call`), so that an update between
the two passes does not invalidate the graph, and the backward pass does not use newer weights by mistake.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from manyhands.core.strategy import Weights
from manyhands.core.worker import Worker

Loss = Callable[[Tensor], Tensor]
"""Of an output."""
NO_TENSORS: Weights = MappingProxyType({})


class Stage:
    """The part of the model that one worker of a pipeline runs."""

    def __init__(self, w: Worker, module: nn.Module, keeps: Literal["graph", "inputs"] = "graph") -> None:
        self._w = w
        self._module = module
        self._keeps = keeps
        parameters = dict(w.model.named_parameters())
        own = {id(p): name for name, p in module.named_parameters()}
        self._names = [own[id(parameters[slot.name])] for slot in w.flat.slots]
        self.live: list[Tensor] = [parameters[slot.name] for slot in w.flat.slots]
        """The current parameters of the stage, in the order of the flat model."""
        self._share = w.share_of(module)
        self._saved: dict[int, tuple[Tensor, Tensor, list[Tensor]]] = {}
        """With graphs: input, output and weights by micro-batch."""
        self._inputs: dict[int, tuple[Tensor, Tensor, list[Tensor], Loss | None]] = {}
        """Without: the input, the state of torch's generator, weights and loss."""

    def forward(self, m: int, x: Tensor, weights: list[Tensor], loss: Loss | None = None) -> Tensor:
        """Run micro-batch `m`; what B(m) needs is kept until then. The output, or the loss if one is given."""
        x = x.detach().requires_grad_() if x.is_floating_point() else x
        with self._w.timer.computing():
            if self._keeps == "graph":
                out = self._run(x, weights, loss)
                self._saved[m] = x, out, weights
            else:
                self._inputs[m] = x, torch.default_generator.get_state(), weights, loss
                out = self._run(x, weights, loss, has_graph=False)
            self._w.charge_passes(len(x), self._share.forward)
        return out.detach()

    def _run(
        self,
        x: Tensor,
        weights: list[Tensor],
        loss: Loss | None,
        buffers: Weights = NO_TENSORS,
        has_graph: bool = True,
    ) -> Tensor:
        """The output or the loss, with the module's own buffers or with others."""
        tensors = {} if weights is self.live else dict(zip(self._names, weights, strict=True))
        tensors.update(buffers)
        with torch.set_grad_enabled(has_graph):
            out: Tensor = functional_call(self._module, tensors, (x,)) if tensors else self._module(x)
            return out if loss is None else loss(out)

    def _replay(self, m: int) -> None:
        """Run micro-batch `m` again from its input, with a graph; buffers and random numbers stay as they are."""
        x, random, weights, loss = self._inputs.pop(m)
        buffers = {name: b.clone() for name, b in self._module.named_buffers()}
        before = torch.default_generator.get_state()
        torch.default_generator.set_state(random)
        self._saved[m] = x, self._run(x, weights, loss, buffers), weights
        torch.default_generator.set_state(before)
        self._w.charge_passes(len(x), self._share.forward)

    def backward(self, m: int, error: Tensor) -> Tensor | None:
        """Back-propagate `error` through micro-batch `m` into the flat gradient; the error for the previous stage."""
        if m in self._inputs:
            with self._w.timer.computing():
                self._replay(m)
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
