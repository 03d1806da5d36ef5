"""Factors: workers send the two thin matrices whose product is a linear layer's gradient, not the gradient itself.

split  data        when  bulk                   who  all-to-all for factors, a collective for the rest
what   factors of linear layers where they are smaller; all else raw      how   any Rule, the same on every worker

    linear    delta_p: K x M, h_p: K x N        of worker p, of its mini-batch (linear_layer.py)
              g = (1/P) sum_p delta_p^T h_p     on every worker;  bias: (1/P) sum of all rows of delta
    rest      g = (1/P) sum_p g_p               one vector of all other gradients
              w <- w + rule(g)

        rank 0 (delta_0, h_0) --+--> rank 1    [delta_0]T [h_0]
                                +--> rank 2    [delta_1]  [h_1]      in this order on every rank:
        rank 1 (delta_1, h_1) --+--> ...       [delta_2]  [h_2]      all end with the same bits

Nothing is lost: it is bsp except for rounding. Factors of a layer of M outputs and N inputs are sent if

    2 K (P - 1) (M + N) <= 2 M N (P + P - 2) / P           elements in and out of a worker: collectives/cost.py

K is measured in the first step: the maximum over all workers, or the batch size if no worker has used the layer. The
choice is then fixed. A layer whose gradient is not the product of the recorded factors, on any worker and in any step,
is summed with the rest from that step on. All ranks know this, because each message says which factors are valid.

A step does not end before all workers have read the factors that were sent to them: the rest is summed after that, and
it is never empty, because it contains the touch counts.

Reference: H. Zhang et al., "Poseidon: an efficient communication architecture for distributed deep learning on GPU
clusters", 2017, https://arxiv.org/abs/1706.03292; P. Xie et al., "Distributed machine learning via sufficient factor
broadcasting", 2015, https://arxiv.org/abs/1511.08486.

Where we differ: what is not sent as factors goes through a collective, not through servers; factors are
sent after the backward pass, not during it; that their product is the gradient is checked.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from manyhands.collectives import collective
from manyhands.collectives.cost import factors_pay
from manyhands.core.declared_state import CustomState, RuleState, StateParts
from manyhands.core.errors import ManyhandsError
from manyhands.core.port import Message, Tag, recv
from manyhands.core.rule import Rule
from manyhands.core.strategy import Batch, Saved, Strategy, Traits, Weights
from manyhands.core.weight_slice import replica_slices
from manyhands.core.worker import Worker
from manyhands.strategies.factors.linear_layer import Layer, Pair, find_layers, left

log = logging.getLogger("manyhands")

FACTORS = Tag("factors")
NONE = -1
"""Number of rows in a message for factors whose product is not the gradient."""

Found = dict[Layer, Pair | None]
"""The factors of some layers; None where they are not valid."""


@dataclass
class Factors(Strategy):
    """Bulk-synchronous training that sends factors of gradients.

    Args:
        rule: how the mean gradient is applied.
        collective: which algorithm sums the rest.
    """

    rule: Rule
    collective: str = "auto"

    @property
    def traits(self) -> Traits:
        return Traits(
            lockstep=True,
            on_worker_loss="ends",
            averages_gradients=True,
            keeps_changes=True,
            lag="always 0",
            lag_counts="all workers update together",
        )

    def setup(self, w: Worker) -> None:
        """The weights with their rule; the collective; layers that may have factors, and their hooks; the choice."""
        self.slices = replica_slices(w.ops, w.flat, self.rule)
        self.sum = collective(self.collective, w.transport, w.workers)
        sends = len(w.workers) > 1 and w.task.gradient is None
        self.layers = find_layers(w.model, w.flat) if sends else []
        self.hooks = [layer.watch() for layer in self.layers]
        self.rows: Tensor | None = None
        self.by_factors: Sequence[Layer] = self.layers
        self.left = [left(group, ()) for group in w.flat.groups]
        self.news: dict[str, Any] = {}

    def step(self, w: Worker, batch: Batch) -> float:
        """Compute, exchange factors, sum the rest, multiply, update."""
        for layer in self.by_factors:
            layer.open()
        loss = w.gradient(batch)
        mine = self._take(w)
        if self.layers and self.rows is None:
            self._measure(w, mine)
        all_factors = self._exchange(w, mine) if self.by_factors else {}
        self._sum_rest(w)
        for layer, (delta, h) in all_factors.items():
            layer.rebuild(w.ops, w.flat, delta, h)
        for group, weight_slice in zip(w.flat.groups, self.slices, strict=True):
            weight_slice.apply_sum(group, len(w.workers), w.samples)
        return loss

    def _take(self, w: Worker) -> Found:
        """The factors that this rank sends."""
        return {layer: layer.take(w.ops, w.flat, w.batch_size) for layer in self.by_factors}

    def _exchange(self, w: Worker, mine: Found) -> dict[Layer, Pair]:
        """The factors of all ranks, in order of rank, for the layers whose factors are valid on every rank."""
        sent = {layer: mine[layer] for layer in self.by_factors}
        tag, me = FACTORS.of(w.step), w.workers.index(w.rank)
        others = [*w.workers[me + 1 :], *w.workers[:me]]
        for rank in others:
            w.transport.send(rank, tag, *packed(sent))
        messages = {rank: recv(w.transport, tag, frm=rank) for rank in others}
        found = [sent if rank == w.rank else unpacked(messages[rank], self.by_factors) for rank in w.workers]
        all_factors: dict[Layer, Pair] = {}
        for layer in self.by_factors:
            pairs = [pair for one in found if (pair := one[layer]) is not None]
            if len(pairs) == len(found):
                deltas, hs = zip(*pairs, strict=True)
                all_factors[layer] = w.ops.joined(deltas), w.ops.joined(hs)
        for message in messages.values():
            message.release()
        self._drop(w, [layer for layer in self.by_factors if layer not in all_factors])
        return all_factors

    def _sum_rest(self, w: Worker) -> None:
        """Sum what is not sent as factors, and the touch counts."""
        for group, cuts in zip(w.flat.groups, self.left, strict=True):
            if len(cuts) == 1 and cuts[0].start == 0:
                self.sum.all_reduce(group.outgoing)
                continue
            rest = w.ops.joined([group.outgoing[cut] for cut in cuts])
            self.sum.all_reduce(rest)
            for cut, piece in zip(cuts, torch.split(rest, [cut.stop - cut.start for cut in cuts]), strict=True):
                w.ops.copy(piece, group.outgoing[cut])

    # -- the choice -------------------------------------------------------------------------------

    def _measure(self, w: Worker, mine: Found) -> None:
        """The largest number of rows of each layer's factors on any worker; infinite if they are not valid."""
        rows = torch.zeros(len(w.workers), len(self.layers), dtype=torch.float64)
        for number, pair in enumerate(mine.values()):
            rows[w.workers.index(w.rank), number] = math.inf if pair is None else len(pair[0])
        self.sum.all_reduce(rows.view(-1))
        most = rows.amax(0)
        self._choose(w, most.where(most > 0, float(w.batch_size)))
        self._report(w)

    def _choose(self, w: Worker, rows: Tensor) -> None:
        """Send factors of those layers for which that is fewer elements than the gradient."""
        self.rows = rows
        pays = [
            factors_pay(layer.M, layer.N, K=K, P=len(w.workers))
            for layer, K in zip(self.layers, rows.tolist(), strict=True)
        ]
        self.by_factors = [layer for layer, less in zip(self.layers, pays, strict=True) if less]
        taken = {slot for layer in self.by_factors for slot in layer.slots}
        self.left = [left(group, taken) for group in w.flat.groups]

    def _drop(self, w: Worker, layers: Sequence[Layer]) -> None:
        """Sum the gradients of these layers with the rest from now on."""
        if layers:
            assert self.rows is not None
            self.rows[[self.layers.index(layer) for layer in layers]] = math.inf
            self._choose(w, self.rows)
            self._report(w)

    def _report(self, w: Worker) -> None:
        """Note the choice for the record: rows by layer, and the names of layers without factors."""
        assert self.rows is not None
        known = zip(self.layers, self.rows.tolist(), strict=True)
        rows = {layer: int(K) for layer, K in known if math.isfinite(K)}
        self.news = {
            "by_factors": {layer.name: K for layer, K in rows.items() if layer in self.by_factors},
            "by_all_reduce": {layer.name: K for layer, K in rows.items() if layer not in self.by_factors},
            "without_factors": [layer.name for layer in self.layers if layer not in rows],
        }
        if w.rank == w.lead:
            log.info("rows of the factors of linear layers: %s", self.news)

    def notes(self) -> Mapping[str, Any]:
        """The choice, in the step in which it is made or changed."""
        news, self.news = self.news, {}
        return news

    # -- the end, checkpoints ---------------------------------------------------------------------

    def finish(self, w: Worker) -> None:
        """Remove the hooks from the model."""
        for hook in self.hooks:
            hook.remove()

    def answer(self, w: Worker) -> Weights | None:
        """The lead's replica: all are equal."""
        return w.named() if w.rank == w.lead else None

    def declared_state(self, w: Worker) -> StateParts:
        """The rule's state; the measured rows, so that the choice is the same after a restart."""
        return {
            "rule": RuleState(w.flat.slots, self.slices),
            "rows": CustomState("shared", self._measured, partial(self._choose_as_before, w)),
        }

    def _measured(self) -> Saved:
        rows = () if self.rows is None else self.rows
        return {layer.name: K.clone() for layer, K in zip(self.layers, rows, strict=False)}

    def _choose_as_before(self, w: Worker, saved: Sequence[Saved]) -> None:
        """Without measured rows of all layers the first step measures them."""
        rows = saved[0]
        if self.layers and all(layer.name in rows for layer in self.layers):
            self._choose(w, torch.stack([rows[layer.name] for layer in self.layers]))


def packed(found: Found) -> tuple[tuple[int, ...], list[Tensor]]:
    """A message: how many rows the factors of each layer have, and the factors with rows."""
    rows = tuple(NONE if pair is None else len(pair[0]) for pair in found.values())
    return rows, [x for pair in found.values() if pair is not None and len(pair[0]) for x in pair]


def unpacked(message: Message, layers: Sequence[Layer]) -> Found:
    """The factors in a message; refused if they do not fit these layers."""
    rest = list(message.tensors)
    found: Found = {}
    for layer, rows in zip(layers, message.meta, strict=False):
        pair = (rest.pop(0), rest.pop(0)) if rows > 0 and len(rest) > 1 else layer.sizes(0)
        if layer.fits(*pair, max(rows, 0)):
            found[layer] = None if rows == NONE else pair
    if rest or not len(found) == len(layers) == len(message.meta):
        raise ManyhandsError(f"rank {message.frm} sent {message.meta} rows that do not fit {len(layers)} layers here")
    return found
