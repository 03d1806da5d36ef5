"""Stage passes: the forward and the backward pass of one pipeline stage, with the messages to its neighbours.

    F(m)  receive the activation of m (stage 0: the data), compute, send it to the next stage (last stage: the loss)
    B(m)  receive the error of m (last stage: from the loss), back-propagate, send it to the previous stage,
          with the loss of m, so that every stage knows it

A received activation is borrowed until B(m): it is part of the graph.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Literal

import torch
from torch import Tensor, nn

from manyhands.core.port import Message, Meta, Tag, Transport, recv
from manyhands.core.stage import Stage
from manyhands.core.strategy import Batch
from manyhands.core.worker import Worker

ACTIVATION, ERROR = Tag("activation"), Tag("error")


class StagePasses:
    """One stage of a pipeline.

    Args:
        w: this rank, whose flat model has the stage's parameters.
        members: the ranks of the pipeline, in the order of the stages.
        module: the layers of this stage.
        depth: the most micro-batches that are in flight at any stage.
        keeps: what is kept of a forward pass: its graph, or only its input.
    """

    def __init__(
        self, w: Worker, members: Transport, module: nn.Module, depth: int, keeps: Literal["graph", "inputs"] = "graph"
    ) -> None:
        self._w = w
        self._members = members
        self.index, self.last = members.rank, members.size - 1
        self.stage = Stage(w, module, keeps)
        self._activation, self._error = ACTIVATION._replace(credit=depth + 1), ERROR._replace(credit=depth + 1)
        self._borrowed: dict[int, Message] = {}
        self.losses: dict[int, Tensor] = {}
        """By micro-batch, from B(m) on; at the last stage from F(m) on."""

    def receive(self, m: int) -> Meta:
        """Borrow the activation of m from the previous stage, if there is one; the numbers that came with it."""
        if self.index == 0:
            return ()
        if m not in self._borrowed:
            self._borrowed[m] = recv(self._members, self._activation.of(m), frm=self.index - 1)
        return self._borrowed[m].meta

    def forward(
        self, m: int, fields: Batch, weights: list[Tensor], rank: int, step: int, key: Hashable, meta: Meta = ()
    ) -> None:
        """F(m): from the data or an activation to an activation or the loss; `rank`, `step` and `key` seed dropout.

        The numbers of `meta` travel on with the activation.
        """
        w, x, loss = self._w, fields[0], self._w.task.loss
        self.receive(m)
        if self.index:
            x = self._borrowed[m].tensors[0]
        w.seed_torch(rank, step, key)
        if self.index < self.last:
            out = self.stage.forward(m, x, weights)
            self._members.send(self.index + 1, self._activation.of(m), meta, [out])
        else:
            assert loss is not None
            self.losses[m] = self.stage.forward(m, x, weights, lambda out: loss(out, fields[-1]))
            w.checked(self.losses[m])

    def backward(self, m: int, share: float) -> None:
        """B(m): from the error of the next stage, or `share` of the loss, to the error of the previous stage."""
        if self.index == self.last:
            error = self.stage.backward(m, torch.ones_like(self.losses[m]) * share)
        else:
            message = recv(self._members, self._error.of(m), frm=self.index + 1)
            error = self.stage.backward(m, message.tensors[0])
            self.losses[m] = torch.tensor(message.meta[0], dtype=message.tensors[0].dtype)
            message.release()
        if self.index:
            assert error is not None
            self._borrowed.pop(m).release()
            self._members.send(self.index - 1, self._error.of(m), (float(self.losses[m]),), [error])
