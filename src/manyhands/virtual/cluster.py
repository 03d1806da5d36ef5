"""Cluster: the hosts and links of a virtual cluster, and the faults that will happen in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from manyhands.core.errors import Refused, refuse_unless
from manyhands.core.units import bytes_per_second, seconds
from manyhands.virtual.cluster_file import read
from manyhands.virtual.faults import Fault, Slow


@dataclass(frozen=True)
class Cluster:
    """A cluster in virtual time: `mh.train(..., on=mh.Cluster(64, bandwidth="1Gbit"))`.

    Args:
        workers: how many workers; they are ranks 0, 1, ...
        servers: how many server ranks, each on its own host; their ranks follow those of the workers.
        hosts: the number of hosts that the workers are spread over; None: one each (one in all if a method needs it).
        cores: cores of a host, shared by the activities of its ranks; None: one for each of its ranks.
        speeds: relative speed of each worker; None: 1.0 for all.
        jitter: standard deviation of the logarithm of every compute time, drawn from the seed.
        latency: of a message between hosts.
        bandwidth: of the link of a host, in each direction.
        local_latency: of a message inside a host.
        local_bandwidth: of messages that a rank sends inside its host.
        cpu_per_byte: core seconds for sending or receiving one byte between hosts.
        stragglers: one or several Slow.
        faults: which ranks or links fail, and when.
        order: the workers finish their gradients in exactly this order, at times 1, 2, 3, ...; for tests.
        turns: the workers take whole steps in this order, at times 0, 1, 2, ...; for tests.
        newcomers: times at which further workers join, if the method allows it; their ranks follow `workers`.
    """

    workers: int = 4
    servers: int = 0
    hosts: int | None = None
    cores: int | None = None
    speeds: Sequence[float] | None = None
    jitter: float = 0.0
    latency: str | float = "50us"
    bandwidth: str | float = "10Gbit"
    local_latency: str | float = "1us"
    local_bandwidth: str | float = "64Gbit"
    cpu_per_byte: float = 0.0
    stragglers: Slow | Sequence[Slow] = ()
    faults: Sequence[Fault] = ()
    order: Sequence[int] | None = None
    turns: Sequence[int] | None = None
    newcomers: Sequence[str | float] = ()

    def __post_init__(self) -> None:
        refuse_unless(self.workers >= 1, "workers", self.workers, ">= 1")
        refuse_unless(self.servers >= 0, "servers", self.servers, ">= 0")
        hosts, cores = self.hosts or 1, self.cores or 1
        refuse_unless(self.hosts != 0 and 1 <= hosts <= self.workers, "hosts", self.hosts, f"1 to {self.workers}")
        refuse_unless(self.cores != 0 and cores >= 1, "cores", self.cores, ">= 1")
        refuse_unless(self.jitter >= 0, "jitter", self.jitter, ">= 0")
        refuse_unless(self.cpu_per_byte >= 0, "cpu_per_byte", self.cpu_per_byte, ">= 0")
        self._check_speeds()
        self._check_ranks()
        prescribed = self.order is not None or self.turns is not None
        refuse_unless(
            not (prescribed and self.newcomers), "newcomers", self.newcomers, "empty if `order` or `turns` is given"
        )
        for at in self.newcomers:
            seconds(at, "the time at which a worker joins")
        for name in ("latency", "local_latency"):
            seconds(getattr(self, name), name)
        for name in ("bandwidth", "local_bandwidth"):
            rate = bytes_per_second(getattr(self, name), name)
            refuse_unless(rate > 0, name, getattr(self, name), "> 0")

    def _check_speeds(self) -> None:
        if self.speeds is not None:
            refuse_unless(len(self.speeds) == self.workers, "the number of speeds", len(self.speeds), str(self.workers))
            refuse_unless(all(0 < s < math.inf for s in self.speeds), "speeds", list(self.speeds), "all > 0")

    def _check_ranks(self) -> None:
        affected = [rank for slow in self.slow for rank in slow.ranks]
        affected += [fault.rank for fault in self.faults if not isinstance(fault, Slow)]
        last = self.size - 1
        for rank in affected:
            refuse_unless(rank <= last, "the rank of a fault or straggler", rank, f"0 to {last}")
        for name, ranks in (("order", self.order or ()), ("turns", self.turns or ())):
            for rank in ranks:
                refuse_unless(0 <= rank < self.workers, f"a rank in {name}", rank, f"0 to {self.workers - 1}")

    @property
    def slow(self) -> list[Slow]:
        """All stragglers: those of `stragglers`, and those among the faults."""
        given = [self.stragglers] if isinstance(self.stragglers, Slow) else list(self.stragglers)
        return given + [fault for fault in self.faults if isinstance(fault, Slow)]

    @property
    def size(self) -> int:
        """The number of ranks, those that join later included."""
        return self.workers + len(self.newcomers) + self.servers

    @property
    def pending_ranks(self) -> range:
        """The ranks that join later."""
        return range(self.workers, self.workers + len(self.newcomers))

    def placement(self) -> list[int]:
        """The host of every rank; servers have their own, and joining workers too, unless all workers share one."""
        hosts = self.hosts or self.workers
        workers = [rank * hosts // self.workers for rank in range(self.workers)]
        if self.hosts == 1:
            return [*workers, *[0 for _ in self.pending_ranks], *range(1, 1 + self.servers)]
        return [*workers, *range(hosts, hosts + len(self.pending_ranks) + self.servers)]

    def on_one_host(self) -> Cluster:
        """This cluster with all workers on one host; refused if it has a different number of hosts."""
        if self.hosts not in (None, 1):
            raise Refused(f"hosts is {self.hosts}, but this method needs all workers on 1 host: they share memory")
        return replace(self, hosts=1)

    @classmethod
    def from_file(cls, path: str | Path) -> Cluster:
        """Read a TOML file whose keys are the arguments; faults and stragglers are tables, faults with a `kind`."""
        return read(path, cls)
