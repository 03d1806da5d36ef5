"""A keeper of rows: the loop of a rank that has some rows of every table (spread.py is how workers reach it).

worker                                  keeper
  ASK_ROWS (clock, table; rows) ------->  has every worker pushed that often? if not, later
  <------------------------------- ROWS
  PUSH_ROWS (clock; rows, values) ----->  the last of a clock: mean of all, rule once per row, clock + 1

  SAVE_ROWS (clock) ------------------->  what the rule remembers, as above when all have pushed
  <------------------------- STATE_ROWS
  RESTORE_ROWS ------------------------>  remember it, before the first push
  NO_MORE_ROWS ------------------------>  the end

A row's gradients are summed in the order of ranks and divided by the number of workers, whoever touched it: as if all
had brought a whole gradient. Nobody can be spared, so a loss ends this loop.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from manyhands.core.holding import Holding
from manyhands.core.protocols import At, Message, Rule, Tag, recv
from manyhands.core.saving import pieces, restore
from manyhands.core.worker import Worker
from manyhands.topology.tables.table import Table

ASK_ROWS, ROWS = Tag("ask-rows", carries="vectors"), Tag("rows")
PUSH_ROWS = Tag("push-rows")
SAVE_ROWS, STATE_ROWS = Tag("save-rows", carries="nothing"), Tag("state-rows")
RESTORE_ROWS = Tag("restore-rows")
NO_MORE_ROWS = Tag("no-more-rows", carries="nothing")

Touched = tuple[Tensor, Tensor]
"""Row numbers and their gradients."""


class Keeper:
    """The loop of the k-th of all keepers."""

    def __init__(self, w: Worker, tables: Sequence[Table], k: int, rule: Rule) -> None:
        self._w = w
        self._t = w.transport
        self._tables = tables
        self._held = [Holding(t.span(k), t.flat.weights(t.span(k)).clone(), t.flat.places, rule) for t in tables]
        self._clock = 0
        self._pushed: dict[int, dict[int, Message]] = {}
        """What has come for every clock, by rank; it is lent."""
        self._early: list[Message] = []
        self._serves = True

    @torch.no_grad()
    def serve(self) -> None:
        """Answer workers until nobody needs rows any more."""
        while self._serves:
            self._handle(recv(self._t, ASK_ROWS, PUSH_ROWS, SAVE_ROWS, RESTORE_ROWS, NO_MORE_ROWS))

    def _handle(self, message: Message) -> None:
        tag = message.tag
        if tag == PUSH_ROWS:
            self._take_in(message)
        elif tag == RESTORE_ROWS:
            self._restore(message)
        elif tag == NO_MORE_ROWS:
            self._serves = False
        elif message.meta[0] > self._clock:
            self._early.append(message)
        elif tag == ASK_ROWS:
            self._show(message)
        else:
            self._save(message)

    def _take_in(self, message: Message) -> None:
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
        """One step for all rows that somebody touched."""
        brought: list[list[Touched]] = [[] for _ in self._tables]
        for message in messages:
            _, samples, numbers = message.meta
            for place, number in enumerate(numbers):
                brought[number].append((message.tensors[2 * place], message.tensors[2 * place + 1]))
        for held, touched in zip(self._held, brought, strict=True):
            if touched:
                mean = _mean(touched, len(messages))
                self._w.move(sum(g.nbytes for _, g in touched) + 2 * mean.values().nbytes)
                held.update_rows(held.marks[0], mean, At(held.weights, samples=samples, count=len(messages)))
        for message in messages:
            message.release()

    def _show(self, message: Message) -> None:
        """Send some rows, or all if none are named."""
        number = message.meta[1]
        weights = self._held[number].weights.view(-1, self._tables[number].width)
        values = weights[message.tensors[0]] if message.tensors else weights.clone()
        message.release()
        self._w.move(values.nbytes)
        self._t.send(message.frm, ROWS, (), (values,))

    def _save(self, message: Message) -> None:
        found = [p for h, table in zip(self._held, self._tables, strict=True) for p in pieces([h], table.flat.places)]
        self._t.send(message.frm, STATE_ROWS, tuple(p[:2] for p in found), [p.values.clone() for p in found])

    def _restore(self, message: Message) -> None:
        saved = dict(zip(message.meta, message.tensors, strict=True))
        for held, table in zip(self._held, self._tables, strict=True):
            restore([held], table.flat.places, saved)
        message.release()


def _mean(touched: Sequence[Touched], workers: int) -> Tensor:
    """The mean over all workers, as a sparse gradient; each of them names a row only once."""
    rows, where = torch.unique(torch.cat([rows for rows, _ in touched]), return_inverse=True)
    total = touched[0][1].new_zeros(len(rows), touched[0][1].shape[1])
    for place, (_, g) in zip(where.split([len(rows) for rows, _ in touched]), touched, strict=True):
        total.index_add_(0, place, g)
    mean, size = total.div_(workers), (int(rows[-1]) + 1, total.shape[1])
    return torch.sparse_coo_tensor(rows[None], mean, size, is_coalesced=True, check_invariants=False)
