"""Pipeline: the model is divided into stages, one per worker; whole mini-batches stream through them.

split  layers      when  after every backward pass      who  the neighbouring stages
what   activations forward, errors backward             how   any Rule, on the stage's own weights

    F(m), B(m)   splits/stage_passes.py, in the order of the schedule; mini-batches of several steps are in flight
    update       after every B(m), with the gradient of mini-batch m

`splits/versions` determines the weights that B(m) uses. Pipelines that flush are teams (splits/piped.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from manyhands.core.declared_state import RuleState, StateParts
from manyhands.core.errors import Refused
from manyhands.core.gather import gather, need_all
from manyhands.core.lag import StepLag, applied_at
from manyhands.core.rule import Rule, UpdateContext
from manyhands.core.strategy import Batch, Strategy, Traits, Weights
from manyhands.core.weight_slice import replica_slices
from manyhands.core.worker import Worker
from manyhands.splits.layers import stages
from manyhands.splits.schedules import in_flight
from manyhands.splits.schedules.timeline import Action, Rows
from manyhands.splits.stage_passes import StagePasses
from manyhands.splits.versions import Latest, Stash


@dataclass
class Pipeline(Strategy):
    """Training with the layers divided into stages, without a flush.

    Args:
        rule: how a stage applies its gradient.
        schedule: makes the rows of actions for K stages and so many mini-batches.
        versions: which weights the backward pass uses.
    """

    rule: Rule
    schedule: Callable[[int, int], Rows]
    versions: type[Latest] | type[Stash]

    @property
    def traits(self) -> Traits:
        divided = "a worker has only a stage of the model, and no whole loss or gradient"
        return Traits(
            lockstep=True,
            on_worker_loss="ends",
            streams=True,
            lag="counted",
            lag_counts="updates of a stage between the forward pass of a mini-batch and its own update",
            plans_ahead=True,
            needs_step=divided,
            needs_whole_model="its workers divide the model themselves",
        )

    def replicas(self, workers: int) -> int:
        """All workers together hold one model."""
        return 1

    def check(self, workers: int, servers: int, batch_size: int, model: nn.Module) -> None:
        """The model must have a layer for each stage."""
        stages(model, workers)

    def setup(self, w: Worker) -> None:
        """This rank's stage and its passes; its row of the schedule; the mini-batches that are in flight."""
        if w.task.loss is None or w.task.sizes_only:
            raise Refused("a pipeline needs a task with a loss function and real data")
        self.index, count = w.workers.index(w.rank), len(w.workers)
        module = stages(w.model, count)[self.index]
        w.lay_out(module)
        depth = max(in_flight(row) for row in self.schedule(count, count))
        self.passes = StagePasses(w, w.transport, module, depth)
        self.slices = replica_slices(w.ops, w.flat, self.rule)
        self.stash = self.versions()
        self._load_row(w)
        self.data: dict[int, Batch] = {}
        self.loss: float | None = None
        w.flat.open(by_hooks=False)

    def _load_row(self, w: Worker) -> None:
        """Make the stage's row of the schedule, for all mini-batches that are left."""
        rows = self.schedule(len(w.workers), w.steps - w.step)
        self.row = [action._replace(m=w.step + action.m) for action in rows[self.index]]
        self.next_action = 0

    def step(self, w: Worker, batch: Batch) -> float | None:
        """Take in one mini-batch; run the actions of the schedule up to the forward pass of the next one."""
        self.data[w.step] = batch
        while self.next_action < len(self.row) and self.row[self.next_action][:2] != ("F", w.step + 1):
            self._act(w, self.row[self.next_action])
            self.next_action += 1
        return self.loss

    def _act(self, w: Worker, action: Action) -> None:
        """One pass of one mini-batch, with the update that follows a backward pass."""
        op, m, _ = action
        if op == "F":
            weights = self.stash.forward(m, self.passes.stage.live, w.ops)
            self.passes.forward(m, self.data.pop(m), weights, w.rank, m, 0)
            return
        self.passes.backward(m, 1.0)
        w.lag = StepLag(w.lag.outcomes.plus(applied_at(self.stash.done(m))))
        self._update(w, m)

    def _update(self, w: Worker, m: int) -> None:
        """Apply the gradient of mini-batch `m`; a rate schedule sees the samples before it, on every stage."""
        w.flat.close()
        for group, weight_slice in zip(w.flat.groups, self.slices, strict=True):
            weight_slice.update(
                group.grad, UpdateContext(weight_slice.weights, samples=m * w.batch_size), group.untouched()
            )
        self.stash.updated()
        w.flat.open(by_hooks=False)
        self.loss = float(self.passes.losses.pop(m))

    def finish(self, w: Worker) -> None:
        """Drain: the run may end before all announced mini-batches."""
        self.quiesce(w)

    def answer(self, w: Worker) -> Weights | None:
        """The weights of all stages, gathered by name."""
        names = tuple(slot.name for slot in w.flat.slots)
        gathered = gather(w, names, [w.flat.weights(slot.span) for slot in w.flat.slots])
        if gathered is None:
            return None
        need_all(w, gathered)
        whole: dict[str, Tensor] = dict(w.model.named_parameters())
        for stage_names, tensors in gathered.values():
            for name, x in zip(stage_names, tensors, strict=True):
                whole[name] = x.view(whole[name].shape)
        return {name: x.detach().clone() for name, x in whole.items()}

    # -- checkpoints ------------------------------------------------------------------------------

    def quiesce(self, w: Worker) -> None:
        """Drain: run the backward passes of the mini-batches taken in."""
        for action in [one for one in self.row[self.next_action :] if one.m < w.step]:
            self._act(w, action)

    def resume(self, w: Worker) -> None:
        """Fill the pipeline again."""
        self._load_row(w)

    def declared_state(self, w: Worker) -> StateParts:
        """The state of the rule, divided over the stages; a resumed run may be divided into other stages."""
        return {"rule": RuleState(w.flat.slots, self.slices, "divided")}
