"""EmbeddingServer: the loop of a rank that holds some rows of every table (client.py is its client).

worker                                  server
  ASK_ROWS (clock, table; rows) ------->  has every worker pushed that often? if not, answered later
  <------------------------------- ROWS
  PUSH_ROWS (clock; rows, values) ----->  the last of a clock: mean of all, rule once per row, clock + 1

  SAVE_ROWS (clock) ------------------->  the state of the rule, when all have pushed
  <------------------------- STATE_ROWS
  RESTORE_ROWS ------------------------>  load it, before the first push
  NO_MORE_ROWS ------------------------>  the end

The gradients of a row are summed in the order of ranks and divided by the number of all workers, as if each had pushed
a dense gradient. The loss of a worker ends this loop.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from manyhands.core.port import Message, Tag, recv
from manyhands.core.rule import Rule, UpdateContext
from manyhands.core.state import restore, state_slices
from manyhands.core.vector_ops import VectorOps
from manyhands.core.weight_slice import WeightSlice
from manyhands.core.worker import Worker
from manyhands.servers.embeddings.table import EmbeddingTable

ASK_ROWS, ROWS = Tag("ask-rows", carries="vectors"), Tag("rows")
PUSH_ROWS = Tag("push-rows")
SAVE_ROWS, STATE_ROWS = Tag("save-rows", carries="nothing"), Tag("state-rows")
RESTORE_ROWS = Tag("restore-rows")
NO_MORE_ROWS = Tag("no-more-rows", carries="nothing")

Touched = tuple[Tensor, Tensor]
"""Row numbers and their gradients."""


class EmbeddingServer:
    """The loop of the k-th server of rows."""

    def __init__(self, w: Worker, tables: Sequence[EmbeddingTable], k: int, rule: Rule) -> None:
        self._w = w
        self._t = w.transport
        self._tables = tables
        self._slices = [
            WeightSlice(w.ops, t.span(k), t.flat.weights(t.span(k)).clone(), t.flat.slots, rule) for t in tables
        ]
        self._clock = 0
        self._pushed: dict[int, dict[int, Message]] = {}
        """The pushes of every clock, by rank; their tensors are lent."""
        self._early: list[Message] = []
        self._serves = True

    @torch.no_grad()
    def serve(self) -> None:
        """Answer workers until NO_MORE_ROWS."""
        while self._serves:
            self._handle(recv(self._t, ASK_ROWS, PUSH_ROWS, SAVE_ROWS, RESTORE_ROWS, NO_MORE_ROWS))

    def _handle(self, message: Message) -> None:
        tag = message.tag
        if tag == PUSH_ROWS:
            self._receive(message)
        elif tag == RESTORE_ROWS:
            self._restore(message)
        elif tag == NO_MORE_ROWS:
            self._serves = False
        elif message.meta[0] > self._clock:
            self._early.append(message)
        elif tag == ASK_ROWS:
            self._send_rows(message)
        else:
            self._save(message)

    def _receive(self, message: Message) -> None:
        pushed = self._pushed.setdefault(message.meta[0], {})
        pushed[message.frm] = message
        if len(pushed) < len(self._w.workers):
            return
        del self._pushed[self._clock]
        self._update([pushed[rank] for rank in self._w.workers])
        self._clock += 1
        early, self._early = self._early, []
        for one in early:
            self._handle(one)

    def _update(self, messages: Sequence[Message]) -> None:
        """One update of all rows that a worker has touched."""
        gradients: list[list[Touched]] = [[] for _ in self._tables]
        for message in messages:
            _, samples, numbers = message.meta
            for slot, number in enumerate(numbers):
                gradients[number].append((message.tensors[2 * slot], message.tensors[2 * slot + 1]))
        for weight_slice, touched in zip(self._slices, gradients, strict=True):
            if touched:
                mean = _mean(self._w.ops, touched, len(messages))
                weight_slice.update_rows(
                    weight_slice.param_ids[0],
                    mean,
                    UpdateContext(weight_slice.weights, samples=samples, count=len(messages)),
                )
        for message in messages:
            message.release()

    def _send_rows(self, message: Message) -> None:
        """Send the rows that a message names, or all if it names none."""
        number = message.meta[1]
        weights = self._slices[number].weights.view(-1, self._tables[number].width)
        values = weights[message.tensors[0]] if message.tensors else weights.clone()
        self._w.ops.computes(values)
        message.release()
        self._t.send(message.frm, ROWS, (), (values,))

    def _save(self, message: Message) -> None:
        found = [
            p for h, table in zip(self._slices, self._tables, strict=True) for p in state_slices([h], table.flat.slots)
        ]
        self._t.send(message.frm, STATE_ROWS, tuple(p[:2] for p in found), [p.values.clone() for p in found])

    def _restore(self, message: Message) -> None:
        saved = dict(zip(message.meta, message.tensors, strict=True))
        for weight_slice, table in zip(self._slices, self._tables, strict=True):
            restore([weight_slice], table.flat.slots, saved)
        message.release()


def _mean(ops: VectorOps, touched: Sequence[Touched], workers: int) -> Tensor:
    """The mean over all workers as a sparse gradient; a worker names each row at most once."""
    rows, where = torch.unique(torch.cat([rows for rows, _ in touched]), return_inverse=True)
    total = touched[0][1].new_zeros(len(rows), touched[0][1].shape[1])
    for slot, (_, g) in zip(where.split([len(rows) for rows, _ in touched]), touched, strict=True):
        ops.computes(g)
        total.index_add_(0, slot, g)
    mean, size = total.div_(workers), (int(rows[-1]) + 1, total.shape[1])
    return torch.sparse_coo_tensor(rows[None], mean, size, is_coalesced=True, check_invariants=False)
