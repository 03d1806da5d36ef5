"""Factors: of a linear layer everyone sends the two thin matrices whose product its gradient is, not the gradient.

split  data        when  bulk                   who  everyone to everyone for factors, a collective for the rest
what   of linear layers factors where they are smaller; all else raw      how   any Rule, the same on every worker

    linear    delta_p: K x M, h_p: K x N        of worker p, as its mini-batch has made them: topology/factors.py
              g = (1/P) sum_p delta_p^T h_p     everyone multiplies for itself;  bias: (1/P) sum of all rows of delta
    rest      g = (1/P) sum_p g_p               one vector of all that is left
              w <- w + rule(g)

        rank 0 (delta_0, h_0) --+--> rank 1    [delta_0]T [h_0]
                                +--> rank 2    [delta_1]  [h_1]      in this order on every rank:
        rank 1 (delta_1, h_1) --+--> ...       [delta_2]  [h_2]      all end with the same bits

Nothing is lost: it is bsp but for rounding. A layer of M outputs and N inputs goes by factors if

    2 K (P - 1) (M + N) <= 2 M N (P + P - 2) / P           elements in and out of a worker: topology/collectives/cost.py

K is measured in the first step: the most on any worker, or the batch size if none has used the layer. The choice then
stays. A layer whose gradient is not the product of what was seen, on any worker and in any step, is summed as
everything else is from that step on; all ranks know, since each says with its factors which of them it trusts.

Nobody ends a step before all have read the factors it has lent: the rest is summed after that, and there is always one,
if only to say which parameters were touched.

Reference: H. Zhang et al., "Poseidon: an efficient communication architecture for distributed deep learning on GPU
clusters", 2017, https://arxiv.org/abs/1706.03292; P. Xie et al., "Distributed machine learning via sufficient factor
broadcasting", 2015, https://arxiv.org/abs/1511.08486.

Where we differ: what is not sent as factors goes through a collective, not through servers; factors leave when the
backward pass has ended, not during it; that they make up the gradient is checked.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from manyhands.core.errors import ManyhandsError
from manyhands.core.holding import replica
from manyhands.core.protocols import Batch, Message, Rule, Saved, Tag, Weights, recv
from manyhands.core.saving import restore, section, under
from manyhands.core.worker import REFERENCE_FLOPS, Worker
from manyhands.strategies.allreduce import apply_sum, rule_state
from manyhands.topology.collectives import all_reducer
from manyhands.topology.collectives.cost import factors_pay
from manyhands.topology.factors import Layer, Pair, find_layers, left

log = logging.getLogger("manyhands")

FACTORS = Tag("factors")
NONE = -1
"""So many rows have factors that do not make up the gradient."""

Found = dict[Layer, Pair | None]
"""The factors of some layers, where they have any."""


@dataclass
class Factors:
    """Bulk-synchronous training that sends factors of gradients.

    Args:
        rule: how the mean gradient is applied.
        collective: which algorithm sums what has no factors.
    """

    rule: Rule
    collective: str = "auto"
    lockstep: ClassVar[bool] = True
    one_host: ClassVar[bool] = False

    def setup(self, w: Worker) -> None:
        """The weights with their rule; the collective; layers that may have factors, seen by hooks; what was chosen."""
        self.held = replica(w.flat, self.rule)
        self.sum = all_reducer(self.collective, w.transport, w.workers)
        sends = len(w.workers) > 1 and w.task.gradient is None
        self.layers = find_layers(w.model, w.flat) if sends else []
        self.hooks = [] if w.flat.is_meta else [layer.watch() for layer in self.layers]
        self.rows: Tensor | None = None
        self.by_factors: Sequence[Layer] = self.layers
        self.left = [left(part, ()) for part in w.flat.parts]
        self.news: dict[str, Any] = {}

    def step(self, w: Worker, batch: Batch) -> float:
        """Compute, swap factors, sum the rest, multiply, update."""
        for layer in self.by_factors:
            layer.open()
        loss = w.gradient(batch)
        mine = self.take(w)
        if self.layers and self.rows is None:
            self.measure(w, mine)
        everyones = self.swap(w, mine) if self.by_factors else {}
        self.sum_rest(w)
        for layer, (delta, h) in everyones.items():
            w.transport.spend(2 * len(h) * layer.M * layer.N / REFERENCE_FLOPS)
            if not h.is_meta:
                layer.rebuild(w.flat, delta, h)
        for part, held in zip(w.flat.parts, self.held, strict=True):
            apply_sum(w, part, held)
        return loss

    def take(self, w: Worker) -> Found:
        """What this rank has to send."""
        if w.flat.is_meta:
            return {layer: layer.sizes(w.batch_size) for layer in self.by_factors}
        w.move(sum(w.flat.gradient_of(layer.weight).nbytes for layer in self.by_factors))
        return {layer: layer.take(w.flat) for layer in self.by_factors}

    def swap(self, w: Worker, mine: Found) -> dict[Layer, Pair]:
        """The factors of all ranks, in their order, of those layers that have some everywhere."""
        sent = {layer: mine[layer] for layer in self.by_factors}
        tag, me = FACTORS.of(w.step), w.workers.index(w.rank)
        others = [*w.workers[me + 1 :], *w.workers[:me]]
        for rank in others:
            w.transport.send(rank, tag, *packed(sent))
        messages = {rank: recv(w.transport, tag, frm=rank) for rank in others}
        found = [sent if rank == w.rank else unpacked(messages[rank], self.by_factors) for rank in w.workers]
        everyones: dict[Layer, Pair] = {}
        for layer in self.by_factors:
            pairs = [pair for one in found if (pair := one[layer]) is not None]
            if len(pairs) == len(found):
                everyones[layer] = torch.cat([delta for delta, _ in pairs]), torch.cat([h for _, h in pairs])
                w.move(sum(x.nbytes for x in everyones[layer]))
        for message in messages.values():
            message.release()
        self.drop(w, [layer for layer in self.by_factors if layer not in everyones])
        return everyones

    def sum_rest(self, w: Worker) -> None:
        """Sum what has no factors, and the marks."""
        for part, cuts in zip(w.flat.parts, self.left, strict=True):
            if len(cuts) == 1 and cuts[0].start == 0:
                self.sum.all_reduce(part.outgoing)
                continue
            rest = torch.cat([part.outgoing[cut] for cut in cuts])
            self.sum.all_reduce(rest)
            w.move(2 * rest.nbytes)
            for cut, piece in zip(cuts, torch.split(rest, [cut.stop - cut.start for cut in cuts]), strict=True):
                part.outgoing[cut].copy_(piece)

    # -- the choice -------------------------------------------------------------------------------

    def measure(self, w: Worker, mine: Found) -> None:
        """How many rows factors have on any worker; infinitely many if there are none: the same for everyone."""
        rows = torch.zeros(len(w.workers), len(self.layers), dtype=torch.float64)
        for place, pair in enumerate(mine.values()):
            rows[w.workers.index(w.rank), place] = math.inf if pair is None else len(pair[0])
        self.sum.all_reduce(rows.view(-1))
        most = rows.amax(0)
        self.choose(w, most.where(most > 0, float(w.batch_size)))
        self.tell(w)

    def choose(self, w: Worker, rows: Tensor) -> None:
        """Send factors of those layers for which that is less."""
        self.rows = rows
        pays = [
            factors_pay(layer.M, layer.N, K=K, P=len(w.workers))
            for layer, K in zip(self.layers, rows.tolist(), strict=True)
        ]
        self.by_factors = [layer for layer, less in zip(self.layers, pays, strict=True) if less]
        taken = {place for layer in self.by_factors for place in layer.places}
        self.left = [left(part, taken) for part in w.flat.parts]

    def drop(self, w: Worker, layers: Sequence[Layer]) -> None:
        """Never send factors of these again."""
        if layers:
            assert self.rows is not None
            self.rows[[self.layers.index(layer) for layer in layers]] = math.inf
            self.choose(w, self.rows)
            self.tell(w)

    def tell(self, w: Worker) -> None:
        """Say what was chosen: rows by layer; of those without factors the names."""
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
        """The choice, once, and whenever it changes."""
        news, self.news = self.news, {}
        return news

    # -- the end, checkpoints ---------------------------------------------------------------------

    def finish(self, w: Worker) -> None:
        """Nobody computes any more."""
        for hook in self.hooks:
            hook.remove()

    def answer(self, w: Worker) -> Weights | None:
        """All replicas are equal."""
        return w.named() if w.rank == w.lead else None

    def state(self, w: Worker) -> Saved | None:
        """What the rule remembers; what was measured, so that the choice is the same."""
        saved = rule_state(w, self.held)
        if saved is None or self.rows is None:
            return saved
        return saved | under("rows", {layer.name: K.clone() for layer, K in zip(self.layers, self.rows, strict=True)})

    def restore(self, w: Worker, saved: Saved) -> None:
        """The same for everyone, whatever their number; what was not measured yet will be."""
        restore(self.held, w.flat.places, section(saved, "rule"))
        rows = section(saved, "rows")
        if self.layers and all(layer.name in rows for layer in self.layers):
            self.choose(w, torch.stack([rows[layer.name] for layer in self.layers]))


def packed(found: Found) -> tuple[tuple[int, ...], list[Tensor]]:
    """How many rows the factors of each layer have, and those of all that have any."""
    rows = tuple(NONE if pair is None else len(pair[0]) for pair in found.values())
    return rows, [x for pair in found.values() if pair is not None and len(pair[0]) for x in pair]


def unpacked(message: Message, layers: Sequence[Layer]) -> Found:
    """The same at the other end; refused if it cannot be for these layers."""
    rest = list(message.tensors)
    found: Found = {}
    for layer, rows in zip(layers, message.meta, strict=False):
        pair = (rest.pop(0), rest.pop(0)) if rows > 0 and len(rest) > 1 else layer.sizes(0)
        if layer.fits(*pair, max(rows, 0)):
            found[layer] = None if rows == NONE else pair
    if rest or not len(found) == len(layers) == len(message.meta):
        raise ManyhandsError(f"rank {message.frm} sent {message.meta} rows that do not fit {len(layers)} layers here")
    return found
