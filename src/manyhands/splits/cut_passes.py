"""Cut passes: the passes of one stage of a module that was cut by running it (splits/cutting.py).

    F(m)  receive what travels, run the stage's segment of the model, send what travels on (last stage: the loss)
    B(m)  receive the errors of what was sent (last stage: from the loss), back-propagate, send the errors of what was
          received, with the loss of m

A message has the tensors that exist; which of them do, and which need an error, is in its metadata.

    TIED  the gradients of parameters that several stages use are summed by the first of these stages, in their order,
          and sent back: all of them apply the same bits
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from manyhands.core.flat import ParamSlot
from manyhands.core.port import Message, Meta, Tag, Transport, recv
from manyhands.core.stage import Keep
from manyhands.core.strategy import Batch
from manyhands.core.worker import Worker
from manyhands.splits.cutting import CutStage
from manyhands.splits.stage_passes import StagePasses

TIED = Tag("tied-gradient", carries="tensors")


class _Saved(NamedTuple):
    """The graph of a micro-batch."""

    samples: int
    weights: list[Tensor]
    received: list[Tensor | None]
    sent: list[Tensor | None]


class CutPasses(StagePasses):
    """One stage of a pipeline; as `StagePasses`, with several tensors that travel."""

    def __init__(self, w: Worker, members: Transport, module: CutStage, depth: int) -> None:
        super().__init__(w, members, module, depth)
        self._module = module
        self._share = w.share_of(module)
        self._saved: dict[int, _Saved] = {}
        slots = {slot.name: slot for slot in w.flat.slots}
        self._tied: list[tuple[ParamSlot, Sequence[int]]] = [
            (slots[name], module.tied[name]) for name in sorted(module.tied.keys() & slots.keys())
        ]
        """In the same order on all stages."""

    def forward(
        self,
        m: int,
        fields: Batch,
        weights: list[Tensor],
        rank: int,
        step: int,
        key: Hashable,
        keep: Keep = "graph",
        meta: Meta = (),
    ) -> None:
        """F(m): from the data or what was received to what is sent, or the loss; `rank`, `step`, `key` seed dropout."""
        w, loss = self._w, self._w.task.loss
        received = self._receive(m) if self.index else []
        w.seed_torch(rank, step, key)
        with w.timer.computing():
            with torch.enable_grad():
                out = self._module(fields if loss is None else fields[:-1], received)
                if self.index == self.last:
                    out = (out if loss is None else loss(out, fields[-1]),)
            self._saved[m] = _Saved(len(fields[0]), weights, received, list(out))
            w.charge_passes(len(fields[0]), self._share.forward)
        if self.index == self.last:
            self.losses[m] = out[0].detach()
            w.checked(out[0])
        else:
            needs_error = tuple(x is not None and x.requires_grad for x in out)
            self._send(self.index + 1, self._next_activation.of(m), needs_error, list(out))

    def backward(self, m: int, share: float) -> None:
        """B(m): from the errors of the next stage, or `share` of the loss, to the errors of the previous stage."""
        saved, message = self._saved.pop(m), None
        if self.index == self.last:
            errors: list[Tensor | None] = [torch.ones_like(self.losses[m]) * share]
        else:
            message = recv(self._members, self._error.of(m), frm=self.index + 1)
            errors = _unpacked(message)
            self.losses[m] = torch.tensor(message.meta[1][0], dtype=torch.float64)
        with self._w.timer.computing():
            found = self._propagate(saved, errors)
            self._w.charge_passes(saved.samples, self._share.backward)
        if message is not None:
            message.release()
        if self.index:
            self._release(m)
            self._send(self.index - 1, self._previous_error.of(m), (float(self.losses[m]),), found)

    def _propagate(self, saved: _Saved, errors: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Put the gradient into the flat one; the errors of what was received."""
        pairs = [
            (x, error)
            for x, error in zip(saved.sent, errors, strict=True)
            if x is not None and error is not None and x.requires_grad
        ]
        leaves = [x for x in saved.received if x is not None and x.requires_grad]
        inputs = [*saved.weights, *leaves]
        if not pairs or not inputs:
            return [None] * len(saved.received)
        outputs, weighed = zip(*pairs, strict=True)
        grads = torch.autograd.grad(outputs, inputs, weighed, allow_unused=True)
        for slot, g in zip(self._w.flat.slots, grads, strict=False):
            if g is not None:
                self._w.flat.put(slot, g)
        found = iter(grads[len(saved.weights) :])
        return [next(found) if x is not None and x.requires_grad else None for x in saved.received]

    def sum_tied(self) -> None:
        """Sum the gradients of tied parameters over the stages that have them; at the end of a step."""
        flat, members = self._w.flat, self._members
        for slot, holders in self._tied:
            gradient, touched = flat.gradient_of(slot), slot.param_id not in flat.untouched()
            if self.index != holders[0]:
                members.send(holders[0], TIED, (touched,), [gradient.clone()])
                message = recv(members, TIED, frm=holders[0])
                gradient.copy_(message.tensors[0])
                touched = message.meta[0]
                message.release()
            else:
                for other in holders[1:]:
                    message = recv(members, TIED, frm=other)
                    gradient.add_(message.tensors[0])
                    touched = touched or message.meta[0]
                    message.release()
                for other in holders[1:]:
                    members.send(other, TIED, (touched,), [gradient.clone()])
            if touched:
                flat.touch(slot)

    # -- messages ---------------------------------------------------------------------------------

    def _send(self, to: int, tag: Tag, facts: tuple[float | bool, ...], values: Sequence[Tensor | None]) -> None:
        exist = tuple(x is not None for x in values)
        self._members.send(to, tag, (exist, facts), [x.detach().contiguous() for x in values if x is not None])

    def _receive(self, m: int) -> list[Tensor | None]:
        """What the previous stage has sent, with leaves for what needs an error; borrowed until B(m)."""
        message = self._borrow(m, self._activation, self._before)
        needs_error = message.meta[1]
        return [
            None if x is None else x.detach().requires_grad_(needs)
            for x, needs in zip(_unpacked(message), needs_error, strict=True)
        ]


def _unpacked(message: Message) -> list[Tensor | None]:
    """The values of a message; None for those that do not exist."""
    tensors = iter(message.tensors)
    return [next(tensors) if exists else None for exists in message.meta[0]]
