"""Stage passes: the forward and the backward pass of one pipeline stage, with the messages to its neighbours.

    F(m)  receive what travels of m (stage 0: nothing), compute, send it to the next stage (last stage: the loss)
    B(m)  receive the errors of what was sent (last stage: from the loss), back-propagate, send the errors of what was
          received to the previous stage, with the loss of m, so that every stage knows it
    I(m)  the first half of B(m): the errors
    W(m)  the second half: the gradients of the weights

What travels is one activation between the layers of an nn.Sequential; skip connections and other values with it where
another module is cut (splits/cutting.py). A message has the tensors that exist; which of them do, and which need an
error, is in its metadata.

What is received is borrowed until B(m) or W(m), because the passes use it in place. So the channel from one stage to
the next needs a credit of as many messages as there are micro-batches in flight. Every stage has channels of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.core.activation_meter import ActivationMeter
from manyhands.core.errors import Refused
from manyhands.core.port import Message, Meta, Tag, Transport, recv
from manyhands.core.stage import Keep, Stage, Values
from manyhands.core.stage_sizes import StageSizes
from manyhands.core.strategy import Batch
from manyhands.core.worker import Worker
from manyhands.splits.cut_stage import CutStage

RankOf = Callable[[int, int], int]
"""rank_of(stage, micro_batch)"""
ACTIVATION, ERROR = Tag("activation"), Tag("error")


def channel(tag: Tag, stage: int, credit: int) -> Tag:
    """The tag of what a stage receives."""
    return tag._replace(name=f"{tag.name}:{stage}", credit=credit)


class StagePasses:
    """One stage of a pipeline.

    Args:
        w: this rank, whose flat model has the stage's parameters.
        members: the ranks of the pipeline.
        module: this stage: layers that take one tensor, or a segment of a module.
        depth: the most micro-batches that are in flight at any rank.
        index: the number of the stage; None: that of the rank.
        stages: the number of all stages; None: one per rank.
        splits: whether its backward passes are I and W.
        meter: measures the activations that the rank keeps.
        rank_of: the rank that has a stage for a micro-batch; None: stage s is on rank s mod P.
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
        rank_of: RankOf | None = None,
    ) -> None:
        is_cut = isinstance(module, CutStage)
        has_loss = w.task.loss is not None or (is_cut and w.task.gradient is None)
        if not has_loss:
            raise Refused("a pipeline needs a task with a loss function")
        self._w = w
        self._members = members
        self.index = members.rank if index is None else index
        self.last = (members.size if stages is None else stages) - 1
        compute = module if is_cut else partial(_through_layers, module)
        kind = StageSizes if w.task.sizes_only else Stage
        self.stage = kind(w, module, compute, splits=splits, meter=meter)
        self._rank_of = rank_of or (lambda stage, m: stage % members.size)
        self._activation, self._error = (channel(tag, self.index, depth) for tag in (ACTIVATION, ERROR))
        self._next_activation = channel(ACTIVATION, self.index + 1, depth)
        self._previous_error = channel(ERROR, self.index - 1, depth)
        self._borrowed: dict[int, list[Message]] = {}
        self._ends: dict[int, Tensor] = {}
        """The losses of the last stage, until their backward passes."""
        self.losses: dict[int, float] = {}
        """By micro-batch, from B(m) on; at the last stage from F(m) on."""

    def receive(self, m: int) -> Meta:
        """Borrow what the previous stage has sent of m, if there is one; the numbers that came with it."""
        if self.index == 0:
            return ()
        if m not in self._borrowed:
            self._borrow(m, self._activation, self._before(m))
        numbers: Meta = self._borrowed[m][0].meta[1]
        return numbers

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
        """F(m): from the data or what was received to what is sent, or the loss; `rank`, `step`, `key` seed dropout.

        The numbers of `meta` travel on with the activation.
        """
        w, loss, seed = self._w, self._w.task.loss, (rank, step, key)
        received = self._received(m, fields)
        inputs = fields if loss is None else fields[:-1]
        ends = None if self.index < self.last else _itself if loss is None else lambda out: loss(out, fields[-1])
        samples = len(fields[0])
        out = self.stage.forward(m, inputs, received, weights, ends, keep=keep, seed=seed, samples=samples)
        if ends is None:
            self._hand_up(m, fields, meta, out, keep)
        else:
            (value,) = out
            assert value is not None
            self._ends[m] = value.detach()
            self.losses[m] = w.checked(value)

    def _received(self, m: int, fields: Batch) -> Values:
        """What the previous stage has sent, as leaves of a graph."""
        self.receive(m)
        return _leaves(self._borrowed[m][0]) if self.index else []

    def _hand_up(self, m: int, fields: Batch, meta: Meta, out: Values, keep: Keep) -> None:
        need_error = tuple(None if x is None else needs_error(x, keep) for x in out)
        self._send(self._after(m), self._next_activation.of(m), (need_error, meta), out)

    def backward(self, m: int, share: float) -> None:
        """B(m): from the errors of the next stage, or `share` of the loss, to the errors of the previous stage."""
        errors = self.stage.backward(m, self._errors_of(m, share))
        self._release(m)
        self._hand_down(m, errors)

    def inward(self, m: int, share: float) -> None:
        """I(m): the same without the gradients of the weights, which `weigh` computes later."""
        self._hand_down(m, self.stage.inward(m, self._errors_of(m, share)))

    def weigh(self, m: int) -> None:
        """W(m): the gradients of the weights."""
        self.stage.weigh(m)
        self._release(m)

    def _errors_of(self, m: int, share: float) -> Values:
        """The errors of what the stage has sent; with them comes the loss."""
        if self.index == self.last:
            return [torch.full_like(self._ends.pop(m), share)]
        message = self._borrow(m, self._error, self._after(m))
        (self.losses[m],) = message.meta[1]
        return values_of(message)

    def _hand_down(self, m: int, errors: Values) -> None:
        if self.index:
            exist = tuple(None if error is None else False for error in errors)
            self._send(self._before(m), self._previous_error.of(m), (exist, (self.losses[m],)), errors)

    # -- messages ---------------------------------------------------------------------------------

    def _before(self, m: int) -> int:
        """The rank with the previous stage."""
        return self._rank_of(self.index - 1, m)

    def _after(self, m: int) -> int:
        """The rank with the next stage."""
        return self._rank_of(self.index + 1, m)

    def _send(self, to: int, tag: Tag, meta: Meta, values: Values) -> None:
        """The metadata begins with a fact for each value: whether it needs an error, or None if it does not exist."""
        self._members.send(to, tag, meta, [x.detach() for x in values if x is not None])

    def _borrow(self, m: int, tag: Tag, frm: int) -> Message:
        message = recv(self._members, tag.of(m), frm=frm)
        self._borrowed.setdefault(m, []).append(message)
        return message

    def _release(self, m: int) -> None:
        for message in self._borrowed.pop(m, ()):
            message.release()


def _through_layers(module: nn.Module, inputs: Batch, received: Values) -> Any:
    """Layers run on the activation, or on the data."""
    given = received or inputs
    if len(given) != 1:
        raise Refused(f"the layers of a stage take one tensor, but {len(given)} come from the stage before or the data")
    return module(given[0])


def _itself(loss: Tensor) -> Tensor:
    """For a model that computes its loss."""
    return loss


def needs_error(x: Tensor, keep: Keep) -> bool:
    """Without a graph it is not known yet."""
    return x.requires_grad if keep == "graph" else x.is_floating_point()


def values_of(message: Message) -> Values:
    """The values of a message; None for those that do not exist."""
    tensors = iter(message.tensors)
    return [None if needs is None else next(tensors) for needs in message.meta[0]]


def _leaves(message: Message) -> Values:
    """The same as leaves of a graph."""
    values = zip(values_of(message), message.meta[0], strict=True)
    return [None if x is None else x.detach().requires_grad_(needs) for x, needs in values]
