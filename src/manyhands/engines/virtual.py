"""Virtual: a run on the ranks of a virtual cluster, in virtual time, all inside this process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from manyhands.core.budget import Budget, FixedSteps
from manyhands.core.rank import Outcome, run_rank
from manyhands.core.record import encoded
from manyhands.core.strategy import Traits
from manyhands.engines.engine import Observe, Ran, make_job
from manyhands.virtual.budget import Prescribed, VirtualSharedBudget
from manyhands.virtual.cluster import Cluster
from manyhands.virtual.world import simulate

if TYPE_CHECKING:
    from manyhands.run.spec import RunSpec


@dataclass(frozen=True)
class Virtual:
    """The engine behind `on=mh.Cluster(...)`."""

    cluster: Cluster

    @property
    def world(self) -> str:
        return "virtual"

    @property
    def roles(self) -> Mapping[str, int]:
        return {"worker": self.cluster.workers, "server": self.cluster.servers}

    @property
    def joiners(self) -> int:
        return len(self.cluster.newcomers)

    @property
    def fixes_order(self) -> bool:
        return self.cluster.order is not None or self.cluster.turns is not None

    def placement(self) -> list[int]:
        return self.cluster.placement()

    def fit(self, traits: Traits) -> Virtual:
        """Put all workers on one host if the method needs that."""
        return Virtual(self.cluster.on_one_host()) if traits.one_host else self

    def facts(self) -> dict[str, Any]:
        return {"world": self.world, "link": None, "cluster": asdict(self.cluster)}

    def run(self, spec: RunSpec, observe: Observe) -> Ran:
        """Simulate the run; lines reach `observe` in the order of virtual time."""

        def budget(steps: int) -> Budget:
            if self.fixes_order:
                return Prescribed(self.cluster)
            return FixedSteps(steps) if spec.lockstep else VirtualSharedBudget(steps * spec.replicas)

        job = make_job(spec, budget, lambda line: observe(encoded(line)))
        simulation = simulate(self.cluster, lambda transport: run_rank(job, transport), spec.seed)
        trained = simulation.results[: self.cluster.workers + self.joiners]
        outcomes = [one for one in trained if isinstance(one, Outcome)]
        return Ran(outcomes, sum(simulation.bytes), simulation.lost)
