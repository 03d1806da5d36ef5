"""Local: a run by real processes of this machine, one for each rank, started and watched from here."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from manyhands.core.budget import Budget
from manyhands.core.errors import refuse_unless
from manyhands.core.model_check import refuse_unlike
from manyhands.core.port import Transport
from manyhands.core.rank import Outcome, run_rank
from manyhands.core.record import Line, encoded
from manyhands.core.strategy import Traits
from manyhands.engines.engine import Observe, Ran, make_job
from manyhands.runtime.budget import Pace, SharedBudget
from manyhands.runtime.launch.launch import launch
from manyhands.runtime.rank_spec import LINKS, join_timeout
from manyhands.runtime.transport.transport import RealTransport

if TYPE_CHECKING:
    from manyhands.run.spec import RunSpec

SEND_EVERY = 0.1
"""Seconds for which a rank collects lines of the record before it sends them."""


@dataclass(frozen=True)
class Local:
    """Real processes of this machine: `mh.train(..., on=mh.Local(workers=4, link="tcp"))`.

    Args:
        workers: how many processes train.
        servers: how many more processes are servers, for methods that have them.
        link: how ranks exchange tensors: "shm" (shared memory), or "tcp" (each rank counts as a host).
        bind: the address to listen on with link "tcp".
        spares: how many workers may join later: one whenever a worker is lost or this process gets SIGUSR1.
        join_timeout: seconds until all processes must be connected; None: MANYHANDS_JOIN_TIMEOUT, or 60.
    """

    workers: int = 2
    servers: int = 0
    link: str = "shm"
    bind: str = "127.0.0.1"
    spares: int = 0
    join_timeout: float | None = None

    def __post_init__(self) -> None:
        refuse_unless(self.workers >= 1, "workers", self.workers, ">= 1")
        refuse_unless(self.servers >= 0, "servers", self.servers, ">= 0")
        refuse_unless(self.link in LINKS, "link", self.link, " or ".join(LINKS))
        refuse_unless(self.spares >= 0, "spares", self.spares, ">= 0")
        join_timeout(self.join_timeout)

    @property
    def world(self) -> str:
        return "real"

    @property
    def roles(self) -> Mapping[str, int]:
        return {"worker": self.workers, "server": self.servers}

    @property
    def joiners(self) -> int:
        return self.spares

    @property
    def fixes_order(self) -> bool:
        return False

    def placement(self) -> list[int]:
        """The host of every rank: one for all with shm, one each with tcp."""
        size = self.workers + self.spares + self.servers
        return list(range(size)) if self.link == "tcp" else [0] * size

    def fit(self, traits: Traits) -> Local:
        """Refuse tcp to a method whose workers share memory."""
        fits = self.link == "shm" or not traits.one_host
        refuse_unless(
            fits, "link", self.link, "shm: the workers of this method share memory, and with tcp each is a host"
        )
        return self

    def facts(self) -> dict[str, Any]:
        return {"world": self.world, "link": self.link, "cluster": None}

    def run(self, spec: RunSpec, observe: Observe) -> Ran:
        """Start the processes, pass the lines they send to `observe`, and wait for all results."""
        launched = launch(
            RankProgram(spec.packed()),
            roles=spec.roles,
            link=self.link,
            bind=self.bind,
            on_lines=lambda parcels: observe(*parcels),
            spares=self.spares,
            deadline=self.join_timeout,
            saves=spec.checkpoints is not None,
        )
        results = [one for one in launched.results if isinstance(one, RankResult)]
        stopped = [one.stopped_at for one in results if one.stopped_at is not None]
        trained = launched.results[: self.workers + self.spares]
        outcomes = [one.outcome for one in trained if isinstance(one, RankResult)]
        sent, last = sum(one.bytes_sent for one in results), _last_step(spec, stopped)
        return Ran(outcomes, sent, launched.lost, last, launched.interrupted)


def _last_step(spec: RunSpec, stopped: list[int]) -> int | None:
    """The step at which a run was stopped, counted as checkpoints do: in steps of all workers together."""
    if not stopped:
        return None
    return max(stopped) if spec.strategy.traits.lockstep else sum(stopped) // spec.roles["worker"]


@dataclass(frozen=True)
class RankResult:
    """What the process of one rank returns."""

    outcome: Outcome
    bytes_sent: int
    stopped_at: int | None
    """How many steps this rank had taken when the run was stopped early, if it was."""


@dataclass(frozen=True)
class RankProgram:
    """What every process runs: its rank's part of the run."""

    spec: RunSpec

    def __call__(self, transport: Transport) -> RankResult:
        assert isinstance(transport, RealTransport)
        spec, lines = self.spec.unpacked(), LineBuffer(lambda parcel: transport.control.send_lines([parcel]))
        job = make_job(spec, _budgets(spec, transport), lines.add)
        joins = transport.rank in transport.pending_ranks
        if not joins:
            refuse_unlike(transport, job.model())
        outcome = run_rank(job, transport)
        lines.send()
        is_stopped = any(segment.budget.stopped for segment in job.segments)
        taken = lines.steps if joins else lines.last_step
        return RankResult(outcome, transport.bytes_sent, taken if is_stopped else None)


def _budgets(spec: RunSpec, transport: RealTransport) -> Callable[[int], Budget] | None:
    """What makes the budgets of this rank, one for each segment of the run; servers have none."""
    pace, numbers = Pace(transport), iter(range(spec.steps + 1))  # a pace also on servers: every rank must report it
    if transport.role == "server":
        return None

    def shared(steps: int) -> Budget:
        return SharedBudget(transport, steps * spec.replicas, f"budget{next(numbers)}")

    return pace.budget if spec.lockstep else shared


class LineBuffer:
    """Collects lines of the record, and sends them encoded and many at once: one by one they would cost three times as
    much, because each step leaves the caches full of its own data. `send_parcel` takes encoded lines."""

    def __init__(self, send_parcel: Callable[[bytes], None]) -> None:
        self._send_parcel = send_parcel
        self._rows: list[Line] = []
        self._sent_at = time.monotonic()
        self.last_step = 0
        """The number of the newest step."""
        self.steps = 0
        """How many steps there were; a worker that joins does not begin with step 1."""

    def add(self, line: Line) -> None:
        """Add a line; all are sent once the oldest has waited for `SEND_EVERY`."""
        if line["kind"] == "step":
            self.last_step = line["step"]
            self.steps += 1
        self._rows.append(line)
        if time.monotonic() - self._sent_at > SEND_EVERY:
            self.send()

    def send(self) -> None:
        """Send all lines that were collected."""
        if self._rows:
            self._send_parcel(b"".join(map(encoded, self._rows)))
            self._rows = []
        self._sent_at = time.monotonic()
