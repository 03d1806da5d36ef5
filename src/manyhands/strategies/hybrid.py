"""Hybrid: dense parameters by all-reduce, sparse embeddings through shards, chosen by measured sparsity.

split  data        when  bulk                   who  a collective for what is dense, shards of rows for what is sparse
what   raw, and of a table only the rows that a mini-batch touches      how   any Rule; for rows one that can skip

    dense     g = (1/P) sum_k g_k                       as in AllReduce, which does it
              w <- w + rule(g)
    table     pull the rows that this mini-batch reads;  push (rows, gradients) of those it touched
              keeper: when all have pushed, once per row:  w_r <- w_r + rule((1/P) sum_k g_k,r)

Which rows a mini-batch reads its embedding knows when it is called: before it looks them up, a hook pulls those that
have not been read since the last push. So it is also if the model is run between two steps, to see how good it is. No
replica is whole meanwhile: the answer is read from the keepers. Rows that two samples share are summed before they are
pushed; a row that few workers touched is divided by P all the same. A wait in a forward pass is nothing special among
real processes; in virtual time it may not fall inside a checkpoint, autocast or inference mode.

alpha is the fraction of a table's rows that a mini-batch touches. It is measured in the first step, before anything is
pushed; the mean over all workers decides. From `threshold` on a table is summed like everything dense. Nothing sparse:
pure all-reduce. Nothing dense: pure servers.

Per machine 4 alpha W (N - 1) / N bytes go in and out for a table of W bytes, as in the paper, and 8 bytes with each
row for its number, four times: asked for and pushed, in and out. The first step has nothing to pull.

Reference: S. Kim et al., "Parallax: sparsity-aware data parallel training of deep neural networks", 2018,
https://arxiv.org/abs/1808.02621.

Where we differ: sparse gradients are averaged as dense ones are (there they are summed by default); sparsity is
measured, not read from the type of a gradient alone; rows are cut evenly over the keepers, without a search for the
best number of cuts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from manyhands.core.errors import Refused, refuse_unless
from manyhands.core.gather import gather
from manyhands.core.holding import skips
from manyhands.core.protocols import Batch, Rule, Saved, Weights
from manyhands.core.saving import join, pieces, restore, section, under
from manyhands.core.worker import Worker
from manyhands.strategies.allreduce import AllReduce, apply_sum
from manyhands.topology.collectives import all_reducer
from manyhands.topology.servers import check_servers
from manyhands.topology.tables import Keeper, Spread, Table, find_tables

log = logging.getLogger("manyhands")


@dataclass
class Hybrid:
    """Bulk-synchronous training with a collective and with shards.

    Args:
        rule: how the mean gradient is applied.
        sparse_rule: how that of a table is; as `rule` if not given.
        threshold: the fraction of touched rows from which on a table is treated as dense.
        collective: which algorithm sums what is dense.
    """

    rule: Rule
    sparse_rule: Rule | None = None
    threshold: float = 0.5
    collective: str = "auto"
    lockstep: ClassVar[bool] = True
    one_host: ClassVar[bool] = False

    def __post_init__(self) -> None:
        refuse_unless(self.threshold >= 0, "threshold", self.threshold, ">= 0")

    @property
    def row_rule(self) -> Rule:
        """What moves the rows of a table."""
        return self.sparse_rule or self.rule

    def check(self, workers: int, servers: int, batch_size: int, model: nn.Module) -> None:
        """Only rows with a gradient are moved, so there must be nothing to do for the others."""
        check_servers(servers, model)
        found = find_tables(model)
        if found and not skips(self.row_rule):
            raise Refused(
                f"the rule for {', '.join(found)} is {self.row_rule}, but must be one that moves nothing without a "
                "gradient, row by row, such as Sgd or Adagrad: give it as sparse_rule, or make the embedding dense"
            )

    def find(self, w: Worker) -> list[Table]:
        """The sparse parameters, which are apart from all others from now on."""
        self.check(len(w.workers), len(w.servers), w.batch_size, w.model)
        found = find_tables(w.model) if w.task.gradient is None else {}
        if found and w.task.sizes_only:
            raise Refused("the sparsity of a table is measured, but a task of sizes only has no gradients")
        w.apart = frozenset(found)
        return [Table(name, module, len(w.servers or w.workers)) for name, module in found.items()]

    def setup(self, w: Worker) -> None:
        """All-reduce for what is dense; keepers, and the way to them; hooks that pull; what was measured."""
        self.tables = self.find(w)
        keepers = w.servers or (w.workers if self.tables else ())
        self.dense = AllReduce(self.rule, self.collective) if w.flat.places else None
        if self.dense is not None:
            self.dense.setup(w)
        self.sum = all_reducer(self.collective, w.transport, w.workers) if self.dense is None else self.dense.sum
        self.spread = Spread(w, self.tables, keepers)
        self.hooks = [self.pull_before(w, number, table) for number, table in enumerate(self.tables)]
        self.alphas: Tensor | None = None
        self.news: dict[str, Any] = {}
        self.ended = False
        if w.rank in keepers:
            w.transport.spawn(Keeper(w, self.tables, keepers.index(w.rank), self.row_rule).serve)

    def serve(self, w: Worker) -> None:
        """Keep rows."""
        Keeper(w, self.find(w), w.servers.index(w.rank), self.row_rule).serve()

    def pull_before(self, w: Worker, number: int, table: Table) -> RemovableHandle:
        """Have an embedding pull the rows it is about to read."""

        def pull(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
            if table.held is None and table.belongs_to(module):
                rows = torch.unique(args[0] if args else kwargs["input"]).long()
                with w.waiting_in_forward():
                    self.spread.pull(number, rows)

        return table.module.register_forward_pre_hook(pull, with_kwargs=True)

    def step(self, w: Worker, batch: Batch) -> float:
        """Compute, and update what is dense; then the tables."""
        for table in self.tables:
            table.flat.open()
        loss = w.gradient(batch) if self.dense is None else self.dense.step(w, batch)
        for table in self.tables:
            table.flat.close()
        if self.tables and self.alphas is None:
            self.measure(w)
        for table in self.tables:
            if table.held is not None:
                part = table.flat.parts[0]
                self.sum.all_reduce(part.outgoing)
                apply_sum(w, part, table.held)
        if any(table.held is None for table in self.tables):
            self.spread.push()
        return loss

    # -- the choice -------------------------------------------------------------------------------

    def measure(self, w: Worker) -> None:
        """The fraction of rows that a mini-batch touches, as a mean over all workers: the same for everyone."""
        alphas = [len(table.gradient()[0]) / table.rows for table in self.tables]
        mean = torch.tensor(alphas, dtype=torch.float64)
        self.sum.all_reduce(mean)
        self.choose(mean.div_(len(w.workers)))
        found = dict(zip(self.tables, mean.tolist(), strict=True))
        self.news["by_shards"] = {table.name: alpha for table, alpha in found.items() if table.held is None}
        self.news["by_all_reduce"] = {table.name: alpha for table, alpha in found.items() if table.held is not None}
        if w.rank == w.lead:
            log.info("fraction of rows that a mini-batch touches: %s", self.news)

    def choose(self, alphas: Tensor) -> None:
        """Treat as dense what has too many rows."""
        self.alphas = alphas
        for table, alpha in zip(self.tables, alphas.tolist(), strict=True):
            if alpha >= self.threshold:
                table.make_dense(self.row_rule)

    def notes(self) -> Mapping[str, Any]:
        """The choice, once."""
        news, self.news = self.news, {}
        return news

    # -- the end ----------------------------------------------------------------------------------

    def finish(self, w: Worker) -> None:
        """Nobody computes any more."""
        for hook in self.hooks:
            hook.remove()
        self.ended = True

    def answer(self, w: Worker) -> Weights | None:
        """Replicas are equal in what is dense; the rows of tables are with their keepers."""
        if gather(w) is None:
            return None
        self.spread.read()
        if self.ended:
            self.spread.end()
        return w.named()

    # -- checkpoints ------------------------------------------------------------------------------

    def state(self, w: Worker) -> Saved | None:
        """What the rules remember, here and at the keepers; what was measured."""
        saved = {} if self.dense is None else self.dense.state(w)
        if w.rank != w.lead or saved is None:
            return None
        saved |= under("rule", join(self.spread.save()))
        for table in self.tables:
            if table.held is not None:  # its keepers have never heard of it
                saved |= under("rule", join(pieces([table.held], table.flat.places)))
        return saved if self.alphas is None else saved | {"alphas": self.alphas}

    def restore(self, w: Worker, saved: Saved) -> None:
        """Everyone the same; the lead tells the keepers."""
        if self.dense is not None:
            self.dense.restore(w, saved)
        rule = section(saved, "rule")
        if "alphas" in saved:
            self.choose(saved["alphas"])
        for table in self.tables:
            if table.held is not None:
                restore([table.held], table.flat.places, rule)
        if w.rank == w.lead:
            self.spread.restore(rule)
