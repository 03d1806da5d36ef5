"""Stage: forward and backward pass of a part of the model, with weights chosen by the caller.

    F(m)  forward       the graph of micro-batch m is kept, or only its input
    B(m)  backward      the gradient into the flat one, and the error for the previous stage; the forward pass is
                        replayed if only the input was kept
    I(m)  inward        the error, and what the weights' gradients need
    W(m)  weigh         those gradients:  B(m) = I(m), W(m)

Weights other than the current ones are passed in as leaves (`torch.func.functional_call`), so that an update between
the two passes does not invalidate the graph, and the backward pass does not use newer weights by mistake.

A replay has the random numbers of the first pass, because it seeds them again, and its buffers (BatchNorm's statistics)
as they were then; it changes copies of them, so that a mini-batch counts once. What a module changes elsewhere is
changed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from manyhands.core.activation_meter import ActivationMeter
from manyhands.core.errors import Refused
from manyhands.core.weight_products import WeightProducts, layers_apart, weigh
from manyhands.core.worker import Worker

Keep = Literal["graph", "inputs"]
"""What is kept between the passes of a micro-batch."""
Seed = tuple[int, int, Hashable]
"""What the random numbers of a pass depend on: a rank, a step and a key."""
Loss = Callable[[Tensor], Tensor]
Products = list[Callable[[], None]]


@dataclass(slots=True)
class Pass:
    """A micro-batch between its passes. `out` is None if only the input is kept; `buffers` are those to replay with."""

    x: Tensor
    weights: list[Tensor]
    loss: Loss | None
    seed: Seed | None
    buffers: Mapping[str, Tensor]
    out: Tensor | None = None
    products: Products = field(default_factory=list)
    layers: WeightProducts | None = None


class Stage:
    """The part of the model that one worker of a pipeline runs, or one of several such parts.

    Args:
        w: this rank, whose flat model has the parameters of the part.
        module: the layers.
        is_first: whether its input is data, for which no error is computed.
        splits: whether its backward passes are I and W.
        meter: measures what is kept; None: nothing is measured.
    """

    def __init__(
        self,
        w: Worker,
        module: nn.Module,
        *,
        is_first: bool = False,
        splits: bool = False,
        meter: ActivationMeter | None = None,
    ) -> None:
        self._w = w
        self._module = module
        self._is_first, self._splits = is_first, splits
        self._meter = meter or ActivationMeter()
        parameters = dict(w.model.named_parameters())
        own = {id(p): name for name, p in module.named_parameters()}
        self._slots = [slot for slot in w.flat.slots if id(parameters[slot.name]) in own]
        self.live: list[Tensor] = [parameters[slot.name] for slot in self._slots]
        """The current parameters of the stage, in the order of the flat model."""
        self._names = [own[id(p)] for p in self.live]
        trained = {id(p) for p in self.live}
        self._copies = [p for p in module.parameters() if p.requires_grad and id(p) not in trained]
        """Parameters that another rank trains: their gradients are computed too, so that all ranks of a team of slices
        go back through the same layers."""
        self._layers = layers_apart(module, splits=splits)
        self._share = w.share_of(module)
        self._saved: dict[int, Pass] = {}

    def forward(
        self,
        m: int,
        x: Tensor,
        weights: list[Tensor],
        loss: Loss | None = None,
        *,
        keep: Keep = "graph",
        seed: Seed | None = None,
    ) -> Tensor:
        """Run micro-batch `m`. The output, or the loss if one is given. `seed`: of dropout and the like."""
        x = x.detach()
        if x.is_floating_point() and not self._is_first:
            x.requires_grad_()
        with self._w.timer.computing():
            buffers = dict(self._module.named_buffers()) if keep == "inputs" else {}
            one = Pass(x, weights, loss, seed, {name: buffer.clone() for name, buffer in buffers.items()})
            one.layers = self._apart(weights, one.products)
            self._saved[m] = one
            version = x._version
            out = self._w.run_pass(partial(self._compute, m, {}, grad=keep == "graph"))
            if keep == "graph":
                one.out = out
                self._meter.keep(self._key(m), out)
            elif x._version != version:
                raise Refused(
                    "a stage changes its input in place, but must not, because a replay reads it: keep graphs"
                )
            self._meter.keep(self._key(m), x)
            self._w.charge_passes(len(x), self._share.forward)
        return out.detach()

    def _compute(self, m: int, buffers: Mapping[str, Tensor], *, grad: bool) -> Tensor:
        """The forward pass of a micro-batch, whose graph is measured."""
        one = self._saved[m]
        with torch.set_grad_enabled(grad), self._meter.saving(self._key(m), one.weights):
            return self._run(one, buffers)

    def _run(self, one: Pass, buffers: Mapping[str, Tensor]) -> Tensor:
        """The output, or the loss; with buffers other than those of the module, if they are given."""
        if one.seed is not None:
            self._w.seed_torch(*one.seed)
        given = dict(buffers)
        if one.weights is not self.live:
            given |= zip(self._names, one.weights, strict=True)
        with one.layers or nullcontext():
            out: Tensor = functional_call(self._module, given, (one.x,)) if given else self._module(one.x)
            return out if one.loss is None else one.loss(out)

    def _apart(self, weights: list[Tensor], products: Products) -> WeightProducts | None:
        if not self._layers:
            return None
        slots = {id(weight): slot for weight, slot in zip(weights, self._slots, strict=True)}
        return WeightProducts(self._w.flat, self._layers, slots, products if self._splits else None)

    def backward(self, m: int, error: Tensor) -> Tensor | None:
        """Back-propagate `error` through micro-batch `m` into the flat gradient; the error for the previous stage."""
        with self._w.timer.computing():
            found = self._propagate(m, error)
            weigh(self._saved[m].products)
            self._w.charge_passes(len(self._saved[m].x), self._share.backward)
        self._forget(m)
        return found

    def inward(self, m: int, error: Tensor) -> Tensor | None:
        """The first half of `backward`: the error for the previous stage. `error` is used until `weigh(m)`."""
        with self._w.timer.computing():
            found = self._propagate(m, error)
            self._w.charge_passes(len(self._saved[m].x), self._share.to_input)
        return found

    def weigh(self, m: int) -> None:
        """The second half: the gradients of the weights."""
        with self._w.timer.computing():
            weigh(self._saved[m].products)
            self._w.charge_passes(len(self._saved[m].x), self._share.to_weights)
        self._forget(m)

    def _propagate(self, m: int, error: Tensor) -> Tensor | None:
        """Run autograd; what it computes of the gradient is put into the flat one."""
        one = self._saved[m]
        if one.out is None:
            one.out = self._w.run_pass(partial(self._compute, m, one.buffers, grad=True))
            self._w.charge_passes(len(one.x), self._share.forward)
        inputs = [*one.weights, *self._copies, *([one.x] if one.x.requires_grad else [])]
        if not (inputs and one.out.requires_grad):  # neither this stage nor a previous one is trained
            return None
        with nullcontext() if one.layers is None else one.layers.propagating():
            grads = self._w.run_pass(partial(torch.autograd.grad, one.out, inputs, error, allow_unused=True))
        one.out = None
        for slot, g in zip(self._slots, grads, strict=False):
            if g is not None:
                self._w.flat.put(slot, g)
        for p, g in zip(self._copies, grads[len(one.weights) :], strict=False):
            p.grad = g if p.grad is None or g is None else p.grad + g
        return grads[-1] if one.x.requires_grad else None

    def _key(self, m: int) -> Hashable:
        return id(self), m

    def _forget(self, m: int) -> None:
        del self._saved[m]
        self._meter.free(self._key(m))
