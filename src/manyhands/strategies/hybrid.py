"""Hybrid: dense parameters by all-reduce, sparse embeddings through servers, chosen by measured sparsity.

split  data        when  bulk                   who  a collective for dense parameters, servers for rows of tables
what   raw, and of a table only the rows that a mini-batch touches      how   any Rule; for rows one that can skip

    dense     g = (1/P) sum_k g_k                       as in AllReduce, which does it
              w <- w + rule(g)
    table     pull the rows that this mini-batch reads;  push (rows, gradients) of those it touched
              server: when all have pushed, once per row:  w_r <- w_r + rule((1/P) sum_k g_k,r)

An embedding knows which rows a mini-batch reads when it is called: before the lookup, a hook pulls those that have not
been read since the last push. The same happens when the model is evaluated between two steps. No replica is complete
until the end: the answer is read from the servers. Gradients of a row that two samples share are summed before they are
pushed; a row that few workers touched is divided by P too. Among real processes a forward pass may wait anywhere; in
virtual time it must not wait inside a checkpoint, autocast or inference mode.

alpha is the fraction of a table's rows that a mini-batch touches. It is measured in the first step, before anything is
pushed; the mean over all workers decides. A table with alpha >= `threshold` is summed like any dense parameter. Without
sparse tables this is pure all-reduce; without dense parameters, pure servers.

Per machine 4 alpha W (N - 1) / N bytes are received and sent for a table of W bytes, as in the paper, and four times 8
bytes for the number of each row: pulled and pushed, received and sent. The first step pulls nothing.

Reference: S. Kim et al., "Parallax: sparsity-aware data parallel training of deep neural networks", 2018,
https://arxiv.org/abs/1808.02621.

Where we differ: sparse gradients are averaged as dense ones are (there they are summed by default); sparsity is
measured, not read from the type of a gradient alone; rows are cut evenly over the servers, without a search for the
best number of cuts.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from manyhands.collectives import collective
from manyhands.core.declared_state import CustomState, RemoteState, RuleState, StatePart, StateParts
from manyhands.core.errors import Refused, refuse_unless
from manyhands.core.gather import gather
from manyhands.core.rule import Rule, skips
from manyhands.core.state import StateSlice, restore, state_slices
from manyhands.core.strategy import Batch, Saved, Strategy, Traits, Weights
from manyhands.core.worker import Worker
from manyhands.servers import check_servers
from manyhands.servers.embeddings import EmbeddingClient, EmbeddingServer, EmbeddingTable, find_tables
from manyhands.strategies.allreduce import AllReduce

log = logging.getLogger("manyhands")


@dataclass
class Hybrid(Strategy):
    """Bulk-synchronous training with a collective and with servers.

    Args:
        rule: how the mean gradient is applied.
        sparse_rule: how that of a sparse table is applied; by default as `rule`.
        threshold: the fraction of touched rows from which on a table is treated as dense.
        collective: which algorithm sums dense gradients.
    """

    rule: Rule
    sparse_rule: Rule | None = None
    threshold: float = 0.5
    collective: str = "auto"

    @property
    def traits(self) -> Traits:
        return Traits(
            lockstep=True,
            on_worker_loss="ends",
            servers=True,
            averages_gradients=True,
            lag="always 0",
            lag_counts="all workers update together",
        )

    def __post_init__(self) -> None:
        refuse_unless(self.threshold >= 0, "threshold", self.threshold, ">= 0")

    @property
    def _row_rule(self) -> Rule:
        """The rule that servers apply to rows."""
        return self.sparse_rule or self.rule

    def check(self, workers: int, servers: int, batch_size: int, model: nn.Module) -> None:
        """Only rows with a gradient are updated, so the rule must not change the others."""
        check_servers(servers, model)
        found = find_tables(model)
        if found and not skips(self._row_rule):
            raise Refused(
                f"the rule for {', '.join(found)} is {self._row_rule}, but must be one that moves nothing without a "
                "gradient, row by row, such as Sgd or Adagrad: give it as sparse_rule, or make the embedding dense"
            )

    def _find(self, w: Worker) -> list[EmbeddingTable]:
        """The sparse tables, which are kept out of the worker's flat model from now on."""
        self.check(len(w.workers), len(w.servers), w.batch_size, w.model)
        found = find_tables(w.trained) if w.task.gradient is None else {}
        if found and w.trained is not w.model:
            raise Refused(
                f"{', '.join(found)} is sparse, but over teams must be dense (sparse=False): its rows are pulled and "
                "pushed once for each mini-batch, and a team divides it"
            )
        if found and w.task.sizes_only:
            raise Refused("the sparsity of a table is measured, but a task of sizes only has no gradients")
        return [EmbeddingTable(name, module, len(w.servers or w.workers)) for name, module in found.items()]

    def setup(self, w: Worker) -> None:
        """All-reduce for dense parameters; servers of rows and their client; hooks that pull; the measured sparsity."""
        self.tables = self._find(w)
        w.lay_out(exclude={table.name for table in self.tables})
        server_ranks = w.servers or (w.workers if self.tables else ())
        self.dense = AllReduce(self.rule, self.collective) if w.flat.slots else None
        if self.dense is not None:
            self.dense.setup(w)
        self.sum = collective(self.collective, w.transport, w.workers) if self.dense is None else self.dense.sum
        self.embeddings = EmbeddingClient(w, self.tables, server_ranks)
        self.hooks = [self._pull_before(w, number, table) for number, table in enumerate(self.tables)]
        self.alphas: Tensor | None = None
        self.unreported: dict[str, Any] = {}
        self.ended = False
        if w.rank in server_ranks:
            w.transport.spawn(EmbeddingServer(w, self.tables, server_ranks.index(w.rank), self._row_rule).serve)

    def serve(self, w: Worker) -> None:
        """Hold some rows of every table."""
        EmbeddingServer(w, self._find(w), w.servers.index(w.rank), self._row_rule).serve()

    def _pull_before(self, w: Worker, number: int, table: EmbeddingTable) -> RemovableHandle:
        """Make an embedding pull the rows that it is about to read."""

        def pull(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
            if table.weight_slice is None and table.belongs_to(module):
                rows = torch.unique(args[0] if args else kwargs["input"]).long()
                with w.waiting_in_forward():
                    self.embeddings.pull(number, rows)

        return table.module.register_forward_pre_hook(pull, with_kwargs=True)

    def step(self, w: Worker, batch: Batch) -> float:
        """Compute, update dense parameters, then the tables."""
        for table in self.tables:
            table.flat.open()
        loss = w.gradient(batch) if self.dense is None else self.dense.step(w, batch)
        for table in self.tables:
            table.flat.close()
        if self.tables and self.alphas is None:
            self._measure(w)
        for table in self.tables:
            if table.weight_slice is not None:
                group = table.flat.groups[0]
                self.sum.all_reduce(group.outgoing)
                table.weight_slice.apply_sum(group, len(w.workers), w.samples)
        if any(table.weight_slice is None for table in self.tables):
            self.embeddings.push()
        return loss

    # -- the choice -------------------------------------------------------------------------------

    def _measure(self, w: Worker) -> None:
        """The fraction of rows that a mini-batch touches: the mean over all workers, so that all choose alike."""
        alphas = [len(table.gradient()[0]) / table.rows for table in self.tables]
        mean = torch.tensor(alphas, dtype=torch.float64)
        self.sum.all_reduce(mean)
        self._choose(w, mean.div_(len(w.workers)))
        found = dict(zip(self.tables, mean.tolist(), strict=True))
        self.unreported["by_shards"] = {
            table.name: alpha for table, alpha in found.items() if table.weight_slice is None
        }
        self.unreported["by_all_reduce"] = {
            table.name: alpha for table, alpha in found.items() if table.weight_slice is not None
        }
        if w.rank == w.lead:
            log.info("fraction of rows that a mini-batch touches: %s", self.unreported)

    def _choose(self, w: Worker, alphas: Tensor) -> None:
        """Make tables dense of which a mini-batch touches too many rows."""
        self.alphas = alphas
        for table, alpha in zip(self.tables, alphas.tolist(), strict=True):
            if alpha >= self.threshold:
                table.make_dense(w.ops, self._row_rule)

    def notes(self) -> Mapping[str, Any]:
        """The choice for each table, in the step in which it was made."""
        notes, self.unreported = self.unreported, {}
        return notes

    # -- the end ----------------------------------------------------------------------------------

    def finish(self, w: Worker) -> None:
        """Remove the hooks; the next answer is the last."""
        for hook in self.hooks:
            hook.remove()
        self.ended = True

    def answer(self, w: Worker) -> Weights | None:
        """Dense parameters are equal on all replicas; rows are read from their servers."""
        if gather(w) is None:
            return None
        self.embeddings.read()
        if self.ended:
            self.embeddings.end()
        return w.named()

    # -- checkpoints ------------------------------------------------------------------------------

    def declared_state(self, w: Worker) -> StateParts:
        """The measured sparsity, by which tables are dense or not; the state of the rules, here and at the servers."""
        dense = self.dense.declared_state(w)["rule"] if self.dense is not None else RuleState((), ())
        return {
            "alphas": CustomState("shared", self._sparsity, partial(self._load_sparsity, w)),
            "rule": RemoteState(partial(self._rule_slices, w, dense), partial(self._load_rule, w, dense), dense.scope),
        }

    def _sparsity(self) -> Saved:
        return {} if self.alphas is None else {"": self.alphas}

    def _load_sparsity(self, w: Worker, saved: Sequence[Saved]) -> None:
        if saved[0]:
            self._choose(w, saved[0][""])

    def _rule_slices(self, w: Worker, dense: StatePart) -> Iterator[StateSlice]:
        """Of dense parameters and, on the lead, of tables: of sparse ones from the servers, of dense ones its own."""
        yield from dense.save()
        if w.rank == w.lead:
            own = {table.name: [table.weight_slice] for table in self.tables if table.weight_slice is not None}
            yield from (one for one in self.embeddings.save() if one.name.rpartition("/")[0] not in own)
            for table in self.tables:
                yield from state_slices(own.get(table.name, []), table.flat.slots)

    def _load_rule(self, w: Worker, dense: StatePart, saved: Saved) -> None:
        """All workers restore the same; the lead restores the servers."""
        dense.load([saved])
        for table in self.tables:
            if table.weight_slice is not None:
                restore([table.weight_slice], table.flat.slots, saved)
        if w.rank == w.lead:
            self.embeddings.restore(saved)
