"""Stage: forward and backward pass of a part of the model, with weights chosen by the caller.

    F(m)  forward       the graph of micro-batch m is kept, or only its inputs
    B(m)  backward      the gradient into the flat one, and the errors for the previous stage; the forward pass is
                        replayed if only the inputs were kept
    I(m)  inward        the errors, and what the weights' gradients need
    W(m)  weigh         those gradients:  B(m) = I(m), W(m)

A stage takes and returns several values: the activation, and skip connections if the model is no chain of layers. One
that is None does not exist; one that does not require a gradient has no error.

Weights other than the current ones are passed in as leaves (core/substitution.py), so that an update between the two
passes does not invalidate the graph, and the backward pass does not use newer weights by mistake.

A replay has the random numbers of the first pass, because it seeds them again, and its buffers (BatchNorm's statistics)
as they were then; it changes copies of them, so that a mini-batch counts once. What a module changes elsewhere is
changed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from manyhands.core.activation_meter import ActivationMeter
from manyhands.core.errors import Refused
from manyhands.core.strategy import Batch
from manyhands.core.substitution import Substitution
from manyhands.core.weight_products import WeightProducts, layers_apart, weigh
from manyhands.core.worker import Worker

Keep = Literal["graph", "inputs"]
"""What is kept between the passes of a micro-batch."""
Seed = tuple[int, int, Hashable]
"""What the random numbers of a pass depend on: a rank, a step and a key."""
Values = Sequence[Tensor | None]
"""What travels between two stages."""
Compute = Callable[[Batch, Values], Any]
"""compute(inputs of the model, received values): a tensor, or a tuple of values; on the last stage any output."""
Loss = Callable[[Any], Tensor]
"""Takes what the last stage computes."""
Products = list[Callable[[], None]]


@dataclass(slots=True)
class Pass:
    """A micro-batch between its passes. `out` is None if only inputs are kept; `buffers` are those to replay with."""

    inputs: Batch
    received: Values
    weights: list[Tensor]
    loss: Loss | None
    seed: Seed | None
    samples: int
    buffers: list[Tensor]
    out: Values | None = None
    products: Products = field(default_factory=list)
    layers: WeightProducts | None = None


class Stage:
    """The part of the model that one worker of a pipeline runs, or one of several such parts.

    Args:
        w: this rank, whose flat model has the parameters of the part.
        module: has the layers of the part.
        compute: runs it.
        splits: whether its backward passes are I and W.
        meter: measures what is kept; None: nothing is measured.
    """

    def __init__(
        self,
        w: Worker,
        module: nn.Module,
        compute: Compute,
        *,
        splits: bool = False,
        meter: ActivationMeter | None = None,
    ) -> None:
        self._w, self._compute, self._splits = w, compute, splits
        self._meter = meter or ActivationMeter()
        parameters = dict(w.model.named_parameters())
        own = {id(p) for p in module.parameters()}
        self._slots = [slot for slot in w.flat.slots if id(parameters[slot.name]) in own]
        self.live: list[Tensor] = [parameters[slot.name] for slot in self._slots]
        """The current parameters of the stage, in the order of the flat model."""
        self._weights = Substitution(w.model, self.live)
        self._buffers = Substitution(w.model, module.buffers())
        self._layers = layers_apart(module, splits=splits)
        self._share = w.share_of(module)
        self._saved: dict[int, Pass] = {}

    def forward(
        self,
        m: int,
        inputs: Batch,
        received: Values,
        weights: list[Tensor],
        loss: Loss | None = None,
        *,
        keep: Keep = "graph",
        seed: Seed | None = None,
        samples: int = 1,
    ) -> Values:
        """Run micro-batch `m`. The values for the next stage, or the loss if one is given.

        Args:
            m: the number of the micro-batch.
            inputs: those of the model.
            received: leaves, of which those that need an error require a gradient.
            weights: to be used by both passes.
            loss: of what the last stage computes.
            keep: what is kept until the backward pass.
            seed: of dropout and the like.
            samples: how many it has.
        """
        with self._w.timer.computing():
            buffers = [buffer.clone() for buffer in self._buffers.current()] if keep == "inputs" else []
            one = Pass(inputs, received, weights, loss, seed, samples, buffers)
            one.layers = self._apart(weights, one.products)
            self._saved[m] = one
            before = _version_numbers(one) if keep == "inputs" else []
            with torch.set_grad_enabled(keep == "graph"), self._meter.saving(self._key(m), weights):
                out = self._run(one)
            if keep == "graph":
                one.out, one.inputs = out, ()
                self._meter.keep(self._key(m), *_existing(out))
            elif _version_numbers(one) != before:
                raise Refused(
                    "a stage changes its input in place, but must not, because a replay reads it: keep graphs"
                )
            self._meter.keep(self._key(m), *_existing(received or inputs))
            self._w.charge_passes(samples, self._share.forward)
        return out

    def _run(self, one: Pass, replays: bool = False) -> Values:
        """What is computed; a replay changes the saved buffers."""
        if one.seed is not None:
            self._w.seed_torch(*one.seed)
        weights = nullcontext() if one.weights is self.live else self._weights.by(one.weights)
        buffers = self._buffers.by(one.buffers) if replays and one.buffers else nullcontext()
        with weights, buffers, one.layers or nullcontext():
            out = self._compute(one.inputs, one.received)
            if one.loss is not None:
                out = one.loss(out)
        return (out,) if isinstance(out, Tensor) else out

    def _apart(self, weights: list[Tensor], products: Products) -> WeightProducts | None:
        if not self._layers:
            return None
        slots = {id(weight): slot for weight, slot in zip(weights, self._slots, strict=True)}
        return WeightProducts(self._w.flat, self._layers, slots, products if self._splits else None)

    def backward(self, m: int, errors: Values) -> Values:
        """Back-propagate through micro-batch `m` into the flat gradient; the errors of what was received."""
        with self._w.timer.computing():
            found = self._propagate(m, errors)
            weigh(self._saved[m].products)
            self._w.charge_passes(self._saved[m].samples, self._share.backward)
        self._forget(m)
        return found

    def inward(self, m: int, errors: Values) -> Values:
        """The first half of `backward`: the errors of what was received. `errors` are used until `weigh(m)`."""
        with self._w.timer.computing():
            found = self._propagate(m, errors)
            self._w.charge_passes(self._saved[m].samples, self._share.to_input)
        return found

    def weigh(self, m: int) -> None:
        """The second half: the gradients of the weights."""
        with self._w.timer.computing():
            weigh(self._saved[m].products)
            self._w.charge_passes(self._saved[m].samples, self._share.to_weights)
        self._forget(m)

    def _propagate(self, m: int, errors: Values) -> Values:
        """Replay the forward pass if only inputs were kept; run autograd."""
        one = self._saved[m]
        if one.out is None:
            with torch.enable_grad(), self._meter.saving(self._key(m), one.weights):
                one.out = self._run(one, replays=True)
            self._w.charge_passes(one.samples, self._share.forward)
        found = self._back(one, errors)
        one.out = None
        return found

    def _back(self, one: Pass, errors: Values) -> Values:
        """What autograd computes: of the gradient, which is put into the flat one, and of the errors."""
        assert one.out is not None
        pairs = [
            (x, error)
            for x, error in zip(one.out, errors, strict=True)
            if x is not None and error is not None and x.requires_grad
        ]
        leaves = [x for x in one.received if x is not None and x.requires_grad]
        inputs = [*one.weights, *leaves]
        if not (inputs and pairs):  # neither this stage nor a previous one is trained
            return [None] * len(one.received)
        outputs, weighed = zip(*pairs, strict=True)
        with nullcontext() if one.layers is None else one.layers.propagating():
            grads = torch.autograd.grad(outputs, inputs, weighed, allow_unused=True)
        for slot, g in zip(self._slots, grads, strict=False):
            if g is not None:
                self._w.flat.put(slot, g)
        found = iter(grads[len(one.weights) :])
        return [next(found) if x is not None and x.requires_grad else None for x in one.received]

    def _key(self, m: int) -> Hashable:
        return id(self), m

    def _forget(self, m: int) -> None:
        del self._saved[m]
        self._meter.free(self._key(m))


def _existing(values: Values) -> list[Tensor]:
    return [x for x in values if x is not None]


def _version_numbers(one: Pass) -> list[int]:
    """They change if a tensor is written in place."""
    return [x._version for x in _existing((*one.inputs, *one.received))]
