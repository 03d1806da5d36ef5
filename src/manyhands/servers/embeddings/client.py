"""EmbeddingClient: a worker pulls rows before it reads them, and pushes the rows that have a gradient.

The clock counts pushes. What is pulled at clock t contains the pushes 0 to t - 1 of every worker: a server answers when
all of them have arrived. So all workers compute on the same weights, though no worker has them all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from manyhands.core.errors import ManyhandsError
from manyhands.core.port import recv
from manyhands.core.state import StateSlice
from manyhands.core.strategy import Saved
from manyhands.core.worker import Worker
from manyhands.servers.embeddings.server import (
    ASK_ROWS,
    NO_MORE_ROWS,
    PUSH_ROWS,
    RESTORE_ROWS,
    ROWS,
    SAVE_ROWS,
    STATE_ROWS,
)
from manyhands.servers.embeddings.table import EmbeddingTable


class EmbeddingClient:
    """A worker's client of all servers of rows."""

    def __init__(self, w: Worker, tables: Sequence[EmbeddingTable], server_ranks: Sequence[int]) -> None:
        self._w = w
        self._t = w.transport
        self._server_ranks = server_ranks
        self._tables = tables
        self.clock = 0

    @property
    def _sparse(self) -> list[tuple[int, EmbeddingTable]]:
        return [(number, table) for number, table in enumerate(self._tables) if table.weight_slice is None]

    def pull(self, number: int, rows: Tensor) -> None:
        """Load the current values of some rows of a table, given in ascending order, unless they are fresh."""
        table = self._tables[number]
        rows = rows[table.read_at[rows] != self.clock]
        cuts = list(table.cuts(rows))
        for k, cut in cuts:
            self._t.send(self._server_ranks[k], ASK_ROWS, (self.clock, number), (rows[cut] - table.bounds[k],))
        for k, cut in cuts:
            self._load(k, table, rows[cut])
        table.read_at[rows] = self.clock

    def _load(self, k: int, table: EmbeddingTable, rows: Tensor | slice) -> None:
        message = recv(self._t, ROWS, frm=self._server_ranks[k])
        (values,) = message.tensors
        self._w.ops.computes(values)
        table.weights[rows] = values
        message.release()

    def push(self) -> None:
        """Push the rows that this step has touched; every server gets a message, because it waits for all workers."""
        groups: list[list[tuple[int, Tensor, Tensor]]] = [[] for _ in self._server_ranks]
        for number, table in self._sparse:
            rows, values = table.gradient()
            self._refuse_stale(table, rows)
            self._w.ops.computes(values)
            for k, cut in table.cuts(rows):
                groups[k].append((number, rows[cut] - table.bounds[k], values[cut]))
        for rank, some in zip(self._server_ranks, groups, strict=True):
            meta = self.clock, self._w.samples, tuple(number for number, *_ in some)
            self._t.send(rank, PUSH_ROWS, meta, [x for _, *pair in some for x in pair])
        self.clock += 1

    def _refuse_stale(self, table: EmbeddingTable, rows: Tensor) -> None:
        stale = int((table.read_at[rows] != self.clock).sum())
        if stale:
            raise ManyhandsError(
                f"{stale} rows of {table.name} have a gradient but were never asked for: its weights must be read "
                "through its module only, because no other rows are loaded"
            )

    # -- for the lead -----------------------------------------------------------------------------

    def read(self) -> None:
        """Load all rows of all tables."""
        for number, table in self._sparse:
            cuts = list(table.cuts(torch.arange(table.rows)))
            for k, _ in cuts:
                self._t.send(self._server_ranks[k], ASK_ROWS, (self.clock, number))
            for k, rows in cuts:
                self._load(k, table, rows)
            table.read_at.fill_(self.clock)

    def save(self) -> list[StateSlice]:
        """The state of the servers' rules, once every worker has pushed."""
        for rank in self._server_ranks:
            self._t.send(rank, SAVE_ROWS, (self.clock,))
        found: list[StateSlice] = []
        for rank in self._server_ranks:
            message = recv(self._t, STATE_ROWS, frm=rank)
            found += [StateSlice(name, start, x) for (name, start), x in zip(message.meta, message.keep(), strict=True)]
        return found

    def restore(self, saved: Saved) -> None:
        """Load a saved state into the servers, before this worker's first push."""
        names = {table.name for table in self._tables}
        wanted = {name: value for name, value in saved.items() if name.rpartition("/")[0] in names}
        for rank in self._server_ranks:
            self._t.send(rank, RESTORE_ROWS, tuple(wanted), tuple(wanted.values()))

    def end(self) -> None:
        """End the servers."""
        for rank in self._server_ranks:
            self._t.send(rank, NO_MORE_ROWS)
