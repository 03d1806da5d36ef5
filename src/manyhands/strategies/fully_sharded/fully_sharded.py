"""FullySharded: every worker keeps 1/P of each parameter, of its gradient and of the rule's state.

split  data        when  bulk                   who  a collective
what   raw         how   any elementwise Rule, each worker on its own shard

    before a module runs, forward or backward      W <- all-gather of the shards w_k
    when its gradient is there                     g_k <- span k of sum over all ranks (reduce-scatter), then free W
    at the end of a step                           w_k <- w_k + rule(g_k / P)

The result is that of bsp: the sums are over the same gradients, and an elementwise rule may be cut anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from manyhands.core.declared_state import RuleState, StateParts
from manyhands.core.errors import Refused, refuse_unless
from manyhands.core.rule import Rule, UpdateContext
from manyhands.core.strategy import Batch, Strategy, Traits, Weights
from manyhands.core.weight_slice import WeightSlice
from manyhands.core.worker import Worker
from manyhands.strategies.allreduce import AllReduce
from manyhands.strategies.fully_sharded.passes import ShardedPasses


@dataclass
class FullySharded(Strategy):
    """Bulk-synchronous training with divided weights.

    Args:
        rule: how the mean gradient is applied; elementwise.
        keep: whether the weights of a module stay gathered between its forward and its backward pass.
        unit: neighbouring modules are gathered together until they have so many parameters.
    """

    rule: Rule
    keep: bool = False
    unit: int = 2**16

    def __post_init__(self) -> None:
        refuse_unless(self.unit >= 1, "unit", self.unit, ">= 1")

    @property
    def kind(self) -> str:
        """That of bsp: each continues from a checkpoint of the other."""
        return AllReduce.__name__

    @property
    def traits(self) -> Traits:
        return Traits(
            lockstep=True,
            on_worker_loss="ends",
            averages_gradients=True,
            needs_step="a worker has the weights of a module only while it runs",
            needs_whole_model="it divides the parameters itself",
            lag="always 0",
            lag_counts="all workers update together",
        )

    def check(self, workers: int, servers: int, batch_size: int, model: nn.Module) -> None:
        """The rule must be able to update a slice of a parameter."""
        if not self.rule.elementwise:
            raise Refused(
                f"{self.rule} needs whole tensors, of which a worker has slices only: use an elementwise rule"
            )
        if "replica" in self.rule.needs:
            raise Refused(f"{self.rule} needs the whole gradient, of which a worker has slices only: use bsp")

    def setup(self, w: Worker) -> None:
        """The units with this worker's shards, and the rule for each; a small unit may have nothing for it."""
        self.passes = ShardedPasses(w, self.keep, self.unit)
        self.sharded = [unit for unit in self.passes.units if unit.own.numel]
        self.slices = [WeightSlice(w.ops, unit.own, unit.weights, w.flat.slots, self.rule) for unit in self.sharded]

    def step(self, w: Worker, batch: Batch) -> float:
        """Compute with gathered weights, update the own shards."""
        loss = self.passes.gradient(batch)
        untouched = self.passes.untouched()
        for unit, weight_slice in zip(self.sharded, self.slices, strict=True):
            at = UpdateContext(weight_slice.weights, samples=w.samples, count=len(w.workers))
            weight_slice.update(unit.gradient, at, untouched, over=len(w.workers))
        return loss

    def finish(self, w: Worker) -> None:
        """There are no more passes."""
        w.end_passes()

    def answer(self, w: Worker) -> Weights | None:
        """The whole model, on the lead."""
        leads = w.rank == w.lead
        whole = self.passes.whole(leads)
        if not leads:
            return None
        named = dict(w.model.named_parameters())
        return {name: whole[name] if p.requires_grad else p.detach().clone() for name, p in named.items()}

    def declared_state(self, w: Worker) -> StateParts:
        """The rule's state, divided among the workers."""
        return {"rule": RuleState(w.flat.slots, self.slices, "divided")}
