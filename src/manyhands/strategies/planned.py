"""Planned: a pipeline that streams, whose stages and replicas PipeDream's partitioner chooses for the run's workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from manyhands.core.worker import Worker
from manyhands.splits.cuts import Cuts
from manyhands.splits.schedules import round_robin
from manyhands.splits.stage_plan import stage_plan
from manyhands.strategies.replicated import Replicated


@dataclass(kw_only=True)
class Planned(Replicated):
    """Training with stages and replicas that are known when the model and the number of workers are.

    Args:
        bandwidth: bytes per second of each link.
        replicas_of: by stage, how many ranks have it; empty until it is planned.
    """

    bandwidth: float
    replicas_of: tuple[int, ...] = ()

    def planned(self, model: nn.Module, workers: int, samples: int) -> Planned:
        """A copy with the stages and replicas for so many workers and samples of a mini-batch."""
        cut, replicas = stage_plan(model, workers, samples, self.bandwidth)
        schedule = partial(round_robin, replicas=replicas)
        return replace(self, cuts=Cuts(cut or None), schedule=schedule, replicas_of=replicas)

    @property
    def plan(self) -> Mapping[str, Any]:
        """What was chosen, for records: where stages 1, 2, ... begin, and the replicas of all; empty if nothing was."""
        if not self.replicas_of:
            return {}
        return {"cut": " ".join(self.cuts.at or ()), "stage_replicas": list(self.replicas_of)}

    def check(self, workers: int, servers: int, batch_size: int, model: nn.Module) -> None:
        """The plan must be one that can be run."""
        Replicated.check(self.planned(model, workers, batch_size), workers, servers, batch_size, model)

    def setup(self, w: Worker) -> None:
        found = self.planned(w.model, len(w.workers), w.batch_size)
        self.cuts, self.schedule, self.replicas_of = found.cuts, found.schedule, found.replicas_of
        super().setup(w)
        self.facts = self.plan
