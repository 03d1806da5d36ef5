"""All tables as a worker reaches them: rows are pulled before they are read, and pushed when they have a gradient.

The clock counts pushes. What is pulled at clock t has seen the pushes 0 to t - 1 of every worker: whoever asks before
they have all come waits. So all workers compute on the same weights, though no worker has them all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from manyhands.core.errors import ManyhandsError
from manyhands.core.protocols import Saved, recv
from manyhands.core.saving import Piece
from manyhands.core.worker import Worker
from manyhands.topology.tables.keeper import (
    ASK_ROWS,
    NO_MORE_ROWS,
    PUSH_ROWS,
    RESTORE_ROWS,
    ROWS,
    SAVE_ROWS,
    STATE_ROWS,
)
from manyhands.topology.tables.table import Table


class Spread:
    """One worker's way to all keepers."""

    def __init__(self, w: Worker, tables: Sequence[Table], keepers: Sequence[int]) -> None:
        self._w = w
        self._t = w.transport
        self._keepers = keepers
        self._tables = tables
        self.clock = 0

    @property
    def _sparse(self) -> list[tuple[int, Table]]:
        return [(number, table) for number, table in enumerate(self._tables) if table.held is None]

    def pull(self, number: int, rows: Tensor) -> None:
        """Have some rows of a table, given in order, as they are now."""
        table = self._tables[number]
        rows = rows[table.read_at[rows] != self.clock]
        cuts = list(table.cuts(rows))
        for k, cut in cuts:
            self._t.send(self._keepers[k], ASK_ROWS, (self.clock, number), (rows[cut] - table.bounds[k],))
        for k, cut in cuts:
            self._take(k, table, rows[cut])
        table.read_at[rows] = self.clock

    def _take(self, k: int, table: Table, rows: Tensor | slice) -> None:
        message = recv(self._t, ROWS, frm=self._keepers[k])
        (values,) = message.tensors
        self._w.move(values.nbytes)
        table.weights[rows] = values
        message.release()

    def push(self) -> None:
        """Hand over the rows that this step has touched. Every keeper hears of it, for it waits for all."""
        parts: list[list[tuple[int, Tensor, Tensor]]] = [[] for _ in self._keepers]
        for number, table in self._sparse:
            rows, values = table.gradient()
            self._refuse_stale(table, rows)
            self._w.move(values.nbytes)
            for k, cut in table.cuts(rows):
                parts[k].append((number, rows[cut] - table.bounds[k], values[cut]))
        for rank, some in zip(self._keepers, parts, strict=True):
            meta = self.clock, self._w.samples, tuple(number for number, *_ in some)
            self._t.send(rank, PUSH_ROWS, meta, [x for _, *pair in some for x in pair])
        self.clock += 1

    def _refuse_stale(self, table: Table, rows: Tensor) -> None:
        stale = int((table.read_at[rows] != self.clock).sum())
        if stale:
            raise ManyhandsError(
                f"{stale} rows of {table.name} have a gradient but were never asked for: its weights must be read "
                "through its module only, for no other rows are there"
            )

    # -- for whoever leads ------------------------------------------------------------------------

    def read(self) -> None:
        """Have all rows of all tables."""
        for number, table in self._sparse:
            cuts = list(table.cuts(torch.arange(table.rows)))
            for k, _ in cuts:
                self._t.send(self._keepers[k], ASK_ROWS, (self.clock, number))
            for k, rows in cuts:
                self._take(k, table, rows)
            table.read_at.fill_(self.clock)

    def save(self) -> list[Piece]:
        """What the keepers' rules remember, once everyone has pushed."""
        for rank in self._keepers:
            self._t.send(rank, SAVE_ROWS, (self.clock,))
        found: list[Piece] = []
        for rank in self._keepers:
            message = recv(self._t, STATE_ROWS, frm=rank)
            found += [Piece(name, start, x) for (name, start), x in zip(message.meta, message.keep(), strict=True)]
        return found

    def restore(self, saved: Saved) -> None:
        """Let the keepers remember; this worker must not have pushed yet, so nothing has moved."""
        names = {table.name for table in self._tables}
        wanted = {name: value for name, value in saved.items() if name.rpartition("/")[0] in names}
        for rank in self._keepers:
            self._t.send(rank, RESTORE_ROWS, tuple(wanted), tuple(wanted.values()))

    def end(self) -> None:
        """Nobody needs rows any more."""
        for rank in self._keepers:
            self._t.send(rank, NO_MORE_ROWS)
