"""Stage passes: the forward and the backward pass of one pipeline stage, with the messages to its neighbours.

    F(m)  receive the activation of m (stage 0: the data), compute, send it to the next stage (last stage: the loss)
    B(m)  receive the error of m (last stage: from the loss), back-propagate, send it to the previous stage,
          with the loss of m, so that every stage knows it
    I(m)  the first half of B(m): the error
    W(m)  the second half: the gradients of the weights

What is received is borrowed until B(m) or W(m), because the passes use it in place. So the channel from one stage to
the next needs a credit of as many messages as there are micro-batches in flight. Every stage has channels of its own.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor, nn

from manyhands.core.activation_meter import ActivationMeter
from manyhands.core.port import Message, Meta, Tag, Transport, recv
from manyhands.core.stage import Keep, Stage
from manyhands.core.strategy import Batch
from manyhands.core.worker import Worker

ACTIVATION, ERROR = Tag("activation"), Tag("error")


def channel(tag: Tag, stage: int, credit: int) -> Tag:
    """The tag of what a stage receives."""
    return tag._replace(name=f"{tag.name}:{stage}", credit=credit)


class StagePasses:
    """One stage of a pipeline.

    Args:
        w: this rank, whose flat model has the stage's parameters.
        members: the ranks of the pipeline; stage s is on rank s mod P.
        module: the layers of this stage.
        depth: the most micro-batches that are in flight at any rank.
        index: the number of the stage; None: that of the rank.
        stages: the number of all stages; None: one per rank.
        splits: whether its backward passes are I and W.
        meter: measures the activations that the rank keeps.
    """

    def __init__(
        self,
        w: Worker,
        members: Transport,
        module: nn.Module,
        depth: int,
        *,
        index: int | None = None,
        stages: int | None = None,
        splits: bool = False,
        meter: ActivationMeter | None = None,
    ) -> None:
        self._w = w
        self._members = members
        self.index = members.rank if index is None else index
        self.last = (members.size if stages is None else stages) - 1
        self.stage = Stage(w, module, is_first=self.index == 0, splits=splits, meter=meter)
        self._before, self._after = ((self.index + step) % members.size for step in (-1, 1))
        self._activation, self._error = (channel(tag, self.index, depth) for tag in (ACTIVATION, ERROR))
        self._next_activation = channel(ACTIVATION, self.index + 1, depth)
        self._previous_error = channel(ERROR, self.index - 1, depth)
        self._borrowed: dict[int, list[Message]] = {}
        self.losses: dict[int, Tensor] = {}
        """By micro-batch, from B(m) on; at the last stage from F(m) on."""

    def receive(self, m: int) -> Meta:
        """Borrow the activation of m from the previous stage, if there is one; the numbers that came with it."""
        if self.index == 0:
            return ()
        if m not in self._borrowed:
            self._borrow(m, self._activation, self._before)
        return self._borrowed[m][0].meta

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
        """F(m): from the data or an activation to an activation or the loss; `rank`, `step` and `key` seed dropout.

        The numbers of `meta` travel on with the activation.
        """
        w, x, loss = self._w, self._input_of(m, fields), self._w.task.loss
        seed = rank, step, key
        if self.index < self.last:
            out = self.stage.forward(m, x, weights, keep=keep, seed=seed)
            self._hand_up(m, fields, meta, out)
        else:
            assert loss is not None
            self.losses[m] = self.stage.forward(m, x, weights, lambda out: loss(out, fields[-1]), keep=keep, seed=seed)
            w.checked(self.losses[m])

    def _hand_up(self, m: int, fields: Batch, meta: Meta, out: Tensor) -> None:
        self._members.send(self._after, self._next_activation.of(m), meta, [out])

    def _input_of(self, m: int, fields: Batch) -> Tensor:
        """The data, or the activation of the previous stage."""
        self.receive(m)
        return self._borrowed[m][0].tensors[0] if self.index else fields[0]

    def backward(self, m: int, share: float) -> None:
        """B(m): from the error of the next stage, or `share` of the loss, to the error of the previous stage."""
        error = self.stage.backward(m, self._error_of(m, share))
        self._release(m)
        self._hand_down(m, error)

    def inward(self, m: int, share: float) -> None:
        """I(m): the same without the gradients of the weights, which `weigh` computes later."""
        self._hand_down(m, self.stage.inward(m, self._error_of(m, share)))

    def weigh(self, m: int) -> None:
        """W(m): the gradients of the weights."""
        self.stage.weigh(m)
        self._release(m)

    def _error_of(self, m: int, share: float) -> Tensor:
        """The error of the stage's output; with it comes the loss."""
        if self.index == self.last:
            return torch.ones_like(self.losses[m]) * share
        message = self._borrow(m, self._error, self._after)
        self.losses[m] = torch.tensor(message.meta[0], dtype=message.tensors[0].dtype)
        return message.tensors[0]

    def _hand_down(self, m: int, error: Tensor | None) -> None:
        if self.index:
            assert error is not None
            self._members.send(self._before, self._previous_error.of(m), (float(self.losses[m]),), [error])

    def _borrow(self, m: int, tag: Tag, frm: int) -> Message:
        message = recv(self._members, tag.of(m), frm=frm)
        self._borrowed.setdefault(m, []).append(message)
        return message

    def _release(self, m: int) -> None:
        for message in self._borrowed.pop(m, ()):
            message.release()
