"""Passes with synthetic errors: those of a stage that waits neither for the error nor, if asked to, for its input.

    F(m)  the input is received, or is I(x); the activation is sent
    B(m)  the error is M(h [, y]); the error of the input is sent, which the previous stage has predicted
    L(m)  receive that error from the next stage, and the activation from the previous one: M and I learn

A loss comes with an error. A stage sends the newest one that it knows, so a loss takes a mini-batch for each stage.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Size, Tensor, nn
from torch.nn.functional import one_hot

from manyhands.core.activation_meter import ActivationMeter
from manyhands.core.errors import Refused, refuse_unless
from manyhands.core.port import Meta, Transport, recv
from manyhands.core.rule import Rule
from manyhands.core.stage import Keep, Values
from manyhands.core.strategy import Batch
from manyhands.core.worker import Worker
from manyhands.splits.stage_passes import StagePasses, needs_error, values_of
from manyhands.splits.synthetic import Build, SyntheticModel

KEYS = M_KEY, I_KEY = 1, 2
"""Of random numbers; those of passes have the key 0."""


class Interface(NamedTuple):
    """What stands in for the neighbours of a stage.

    Args:
        build: makes M and I.
        rule: how they are updated.
        conditional: whether M sees the target.
        inputs: whether there is an I.
    """

    build: Build
    rule: Rule
    conditional: bool
    inputs: bool


class SyntheticPasses(StagePasses):
    """One stage of a pipeline whose errors are predicted."""

    def __init__(
        self,
        w: Worker,
        members: Transport,
        module: nn.Module,
        depth: int,
        interface: Interface,
        meter: ActivationMeter | None = None,
    ) -> None:
        super().__init__(w, members, module, depth, meter=meter)
        own = {id(p) for p in module.parameters()}
        names = [name for name, p in w.model.named_parameters() if id(p) in own]
        build, rule, self._conditional, self._predicts_inputs = interface
        self.errors = SyntheticModel(w, rule, build, names[-1], M_KEY)
        self.inputs = SyntheticModel(w, rule, build, names[0], I_KEY)
        self._classes = next((x.out_features for x in reversed([*w.model.modules()]) if isinstance(x, nn.Linear)), 0)
        self._seen_by_errors: dict[int, Tensor] = {}
        self._shapes: dict[int, list[Size | None]] = {}
        """Of what was sent: skip connections too; None: it needs no error."""
        self._seen_by_inputs: dict[int, Tensor] = {}
        self.newest_loss = math.nan
        """NaN: none is known yet."""

    def receive(self, m: int) -> Meta:
        return () if self.inputs.is_made else super().receive(m)

    def _hand_up(self, m: int, fields: Batch, meta: Meta, out: Values, keep: Keep) -> None:
        super()._hand_up(m, fields, meta, out, keep)
        wanted = [x.detach() if x is not None and needs_error(x, keep) else None for x in out]
        for x in (x for x in wanted if x is not None):
            bound = f"{len(fields[0])}: it is the number of samples"
            refuse_unless(len(x) == len(fields[0]), "the first dimension of an activation", len(x), bound)
        self._shapes[m] = [None if x is None else x.shape for x in wanted]
        h = torch.cat([_rows(x) for x in wanted if x is not None], 1)
        seen = self._seen_by_errors[m] = self._conditions(h, fields[-1])
        if not self.errors.is_made:
            self.errors.make(seen.shape[1], h.shape[1:], h)

    def _received(self, m: int, fields: Batch) -> Values:
        """The first mini-batch of a run has the real activation, because its size is not known before."""
        if self.inputs.is_made:
            self._seen_by_inputs[m] = _rows(fields[0])
            return [self.inputs.predict(self._seen_by_inputs[m]).requires_grad_()]
        values = super()._received(m, fields)
        if self.index and self._predicts_inputs:
            if not fields[0].is_floating_point():
                why = f"the data are {fields[0].dtype}, but must be floating-point numbers"
                raise Refused(f"synthetic_inputs is True: {why}")
            h = _only(values)
            self.inputs.make(_rows(fields[0]).shape[1], h.shape[1:], h)
        return values

    def _errors_of(self, m: int, share: float) -> Values:
        """The prediction; at the last stage the error of the loss."""
        if self.index == self.last:
            self.newest_loss = self.losses[m]
            return super()._errors_of(m, share)
        self.losses[m] = self.newest_loss
        seen = self._seen_by_errors[m]
        shapes, predicted = self._shapes[m], self.errors.predict(seen).mul_(share / len(seen))
        sizes = [shape[1:].numel() for shape in shapes if shape is not None]
        parts = iter(torch.split(predicted, sizes, 1))
        return [None if shape is None else next(parts).view(shape) for shape in shapes]

    def learn(self, m: int, samples: int) -> None:
        """L(m): M and I learn from what has come; `samples`: how many the run had consumed before m."""
        if self.index < self.last:
            message = recv(self._members, self._error.of(m), frm=self._after(m))
            (self.newest_loss,) = message.meta[1]
            seen, shapes = self._seen_by_errors.pop(m), self._shapes.pop(m)
            pairs = [(shape, x) for shape, x in zip(shapes, values_of(message), strict=True) if shape is not None]
            errors = [seen.new_zeros(shape) if x is None else x for shape, x in pairs]
            self.errors.learn(seen, torch.cat([_rows(x) for x in errors], 1) * len(seen), samples)
            message.release()
        if m in self._seen_by_inputs:
            message = recv(self._members, self._activation.of(m), frm=self._before(m))
            self.inputs.learn(self._seen_by_inputs.pop(m), message.tensors[0], samples)
            message.release()

    def _conditions(self, h: Tensor, target: Tensor) -> Tensor:
        """What M sees: h, and the target if it is conditional; class numbers are one-hot."""
        if not self._conditional:
            return h
        refuse_unless(len(target) == len(h), "the number of targets", len(target), f"{len(h)}, one for each sample")
        if not target.is_floating_point():
            bound = f">= 0 and < {self._classes}, the outputs of the last linear layer, if M is conditional"
            for extreme in () if self._w.task.sizes_only else (int(target.min()), int(target.max())):
                refuse_unless(0 <= extreme < self._classes, "a target", extreme, bound)
            target = one_hot(target.long(), self._classes)
        return torch.cat([h, _rows(target).to(h.dtype)], 1)


def _only(values: Values) -> Tensor:
    """The activation, if nothing else travels."""
    if len(values) != 1 or values[0] is None:
        raise Refused(f"{len(values)} values travel over a cut, but synthetic_inputs predicts one activation")
    return values[0].detach()


def _rows(x: Tensor) -> Tensor:
    """One vector for each sample."""
    return x.reshape(len(x), -1)
