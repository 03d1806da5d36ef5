"""Synthetic models: small networks that predict what comes over a cut (decoupled neural interfaces).

    M(h [, y])   the error of the activation h that a stage sends
    I(x)         the activation that a stage receives

    phi <- phi + rule(g),   g = d/dphi 1/b sum over samples of 1/2 |prediction - truth|^2

M predicts the error of each sample's own loss, so that it does not depend on the size b of a mini-batch. A model is
made when the first activation of its cut is there, or from a checkpoint. It has a flat model and a rule of its own, so
that updates, checkpoints and footprint are those of any weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import torch
from torch import Size, Tensor, nn

from manyhands.core.declared_state import Scope
from manyhands.core.errors import Refused, refuse_unless
from manyhands.core.flat import Flat
from manyhands.core.rule import Rule, UpdateContext
from manyhands.core.state import StateSlice, load_vectors, named, restore, section, state_slices
from manyhands.core.strategy import Saved
from manyhands.core.weight_slice import replica_slices
from manyhands.core.work import OPERATIONS_PER_PARAMETER
from manyhands.core.worker import Worker

Build = Callable[[int, int], nn.Module]
"""build(inputs, outputs): a network from vectors of one length to vectors of another."""
SIZES = "sizes:"


def perceptron(inputs: int, outputs: int, hidden: int, layers: int) -> nn.Sequential:
    """`layers` hidden layers, each normalised. The last layer is 0 at first, and so are the predictions."""
    widths = [inputs, *[hidden] * layers]
    parts: list[nn.Module] = []
    for one, next_one in pairwise(widths):
        parts += [nn.Linear(one, next_one), nn.LayerNorm(next_one), nn.ReLU()]
    last = nn.Linear(widths[-1], outputs)
    for p in last.parameters():
        nn.init.zeros_(p)
    return nn.Sequential(*parts, last)


class SyntheticModel:
    """M or I of one cut, and its part of a checkpoint.

    Args:
        w: this rank.
        rule: how the model is updated.
        build: makes the network.
        cut: the name of the cut, by which the state is saved.
        key: the random numbers of the first weights depend on it.
    """

    scope: Scope = "divided"

    def __init__(self, w: Worker, rule: Rule, build: Build, cut: str, key: int) -> None:
        self._w, self._rule, self._build, self._cut, self._key = w, rule, build, cut, key
        self.is_made = False

    def make(self, inputs: int, shape: Sequence[int], like: Tensor) -> None:
        """Make the network. `shape`: of a prediction for one sample; `like`: a tensor of the same kind."""
        self._w.seed_torch(self._w.workers.index(self._w.rank), 0, self._key)
        self._inputs, self._shape, self._dtype = inputs, Size(shape), like.dtype
        self._network = self._build(inputs, self._shape.numel()).to(like)
        self._flat = Flat(dict(self._network.named_parameters()))
        self._slices = replica_slices(self._w.ops, self._flat, self._rule)
        self.is_made = True

    def predict(self, x: Tensor) -> Tensor:
        """The prediction for each sample."""
        with self._w.timer.computing(), torch.no_grad():
            self._charge(1, len(x))
            return self._run(x).view(len(x), *self._shape)

    def learn(self, x: Tensor, truth: Tensor, samples: int) -> None:
        """An update towards what was to be predicted; `samples`: how many the run had consumed before."""
        if not self._flat.slots:
            return
        with self._w.timer.computing(), torch.enable_grad():
            self._charge(3, len(x))
            wrong = self._run(x) - truth.reshape(len(x), -1)
            weights = [self._flat.parameter(slot) for slot in self._flat.slots]
            grads = torch.autograd.grad(wrong, weights, wrong.detach() / len(x))
        self._flat.open(by_hooks=False)
        for slot, g in zip(self._flat.slots, grads, strict=True):
            self._flat.put(slot, g)
        self._flat.close()
        for group, weight_slice in zip(self._flat.groups, self._slices, strict=True):
            weight_slice.update(group.grad, UpdateContext(weight_slice.weights, samples=samples), group.untouched())

    def _run(self, x: Tensor) -> Tensor:
        what = f"the size of a sample at the cut {self._cut}"
        refuse_unless(x.shape[1] == self._inputs, what, x.shape[1], f"{self._inputs}, as it was at first")
        out: Tensor = self._network(x.to(self._dtype))
        return out

    def _charge(self, passes: int, samples: int) -> None:
        self._w.ops.charge_flops(passes * OPERATIONS_PER_PARAMETER * self._flat.numel * samples)

    # -- checkpoints ------------------------------------------------------------------------------

    def save(self) -> Iterator[StateSlice]:
        if not self.is_made:
            return
        yield StateSlice(f"{self._cut}/{SIZES}", 0, torch.tensor([self._inputs, *self._shape]))
        for name, values in named(self._flat.slots, self._memory).items():
            yield StateSlice(f"{self._cut}/weights/{name}", 0, values)
        for piece in state_slices(self._slices, self._flat.slots):
            yield piece._replace(name=f"{self._cut}/rule/{piece.name}")

    def load(self, saved: Sequence[Saved]) -> None:
        """A cut that the checkpoint does not have, because the stages are others, begins with a new model."""
        for one in saved:
            found = section(one, self._cut)
            if found:
                self._load(found[SIZES], section(found, "weights"), section(found, "rule"))

    def _load(self, sizes: Tensor, weights: Saved, rule: Saved) -> None:
        inputs, *shape = sizes.tolist()
        self.make(inputs, shape, next(iter(weights.values()), torch.empty(0)))
        if weights.keys() != {slot.name for slot in self._flat.slots}:
            had = (
                f"the synthetic model at the cut {self._cut} had the parameters {', '.join(weights)} in the checkpoint"
            )
            raise Refused(f"{had}: resume with the layers that it was saved with")
        load_vectors(self._flat.slots, self._memory, weights)
        restore(self._slices, self._flat.slots, rule)

    @property
    def _memory(self) -> list[Tensor]:
        return [group.weights for group in self._flat.groups]
