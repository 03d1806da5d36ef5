"""The virtual world: creates a cluster's ranks, runs their programs, and injects its faults."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from manyhands.core.errors import ManyhandsError, PeerLost
from manyhands.core.garbage import rare_collections
from manyhands.core.port import Transport
from manyhands.core.units import bytes_per_second, seconds
from manyhands.virtual.closed_form_collectives import CallGroup, CollectiveCall
from manyhands.virtual.cluster import Cluster
from manyhands.virtual.cores import Cores
from manyhands.virtual.faults import Fault, Slow, SlowLink
from manyhands.virtual.kernel import Kernel, VirtualActivity
from manyhands.virtual.links import Network
from manyhands.virtual.messages import VirtualMessage
from manyhands.virtual.presence import Presence
from manyhands.virtual.transport import VirtualTransport

YOUNG, YOUNG_PER_RANK = 100_000, 100
"""New objects between two runs of the cyclic garbage collector, at least; every rank's messages are among them."""


class World:
    """One cluster in one run."""

    def __init__(self, cluster: Cluster, seed: int = 0) -> None:
        self.cluster = cluster
        self.seed = seed
        self.kernel = Kernel()
        self.hosts = cluster.placement()
        self.lost: list[tuple[int, str]] = []
        self.locks: dict[tuple[int, str], deque[VirtualActivity]] = {}
        self.call_groups: dict[Sequence[int], CallGroup] = {}
        self.calls: dict[CallGroup, CollectiveCall] = {}
        self.gone: dict[int, str] = dict.fromkeys(cluster.pending_ranks, "it has not joined yet")
        """Why a rank is absent, for every absent rank."""
        self.watchers: dict[int, dict[VirtualTransport, int]] = {rank: {} for rank in range(-1, cluster.size)}
        """The transports with an activity that waits for a rank (ANY is -1), and how many of them."""
        self._memory: dict[tuple[int, str], Tensor] = {}
        self._latency = seconds(cluster.latency), seconds(cluster.local_latency)
        self._rate = bytes_per_second(cluster.bandwidth), bytes_per_second(cluster.local_bandwidth)
        self.network = self._links()
        ranks_of = Counter(self.hosts)
        self.cores = {host: Cores(self.kernel, cluster.cores or ranks) for host, ranks in ranks_of.items()}
        others = cluster.size - cluster.workers
        speeds = [*(cluster.speeds or [1.0] * cluster.workers), *([1.0] * others)]
        self.roles = ["worker"] * (cluster.size - cluster.servers) + ["server"] * cluster.servers
        self.present = Presence(self.roles, cluster.pending_ranks)
        self.ranks = [VirtualTransport(self, rank, speeds[rank]) for rank in range(cluster.size)]
        self._schedule_faults()

    def _links(self) -> Network:
        (latency, local_latency), (rate, local_rate) = self._latency, self._rate
        return Network(
            self.kernel,
            self.hosts,
            latency=latency,
            bandwidth=rate,
            local_latency=local_latency,
            local_bandwidth=local_rate,
            deliver=self._deliver,
        )

    def _schedule_faults(self) -> None:
        cluster = self.cluster
        for fault in [*cluster.slow, *(one for one in cluster.faults if not isinstance(one, Slow))]:
            if isinstance(fault, Slow | SlowLink) and not seconds(fault.at):
                self._inject(fault)  # in force before any rank begins
            else:
                self.kernel.at(seconds(fault.at), self._inject, fault)

    def turns(self, rank: int) -> Iterator[float] | None:
        """When this rank's gradients end, if the cluster prescribes an order of events."""
        if self.cluster.turns is not None:
            return iter(lambda: self.kernel.now, None)
        if self.cluster.order is not None:
            return (index + 1.0 for index, one in enumerate(self.cluster.order) if one == rank)
        return None

    def link(self, group: Sequence[int]) -> tuple[float, float]:
        """Latency and bytes per second among these ranks."""
        local = len({self.hosts[rank] for rank in group}) == 1
        return self._latency[local], self._rate[local]

    def shared(self, host: int, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        """Zeroed memory, one for each host and name."""
        memory = self._memory.get((host, name))
        if memory is None:
            memory = self._memory[host, name] = torch.zeros(numel, dtype=dtype)
        if memory.numel() != numel or memory.dtype != dtype:
            raise ManyhandsError(f"shared memory {name!r} has {memory.numel()} {memory.dtype}, not {numel} {dtype}")
        return memory

    def _deliver(self, delivery: tuple[VirtualTransport, int, VirtualMessage]) -> None:
        sender, to, message = delivery
        if sender.rank in self.gone and self.gone[sender.rank] != "left":
            return
        sender.sent()
        if to not in self.gone:
            self.ranks[to].deliver(message)

    # -- membership -------------------------------------------------------------------------------

    def why_gone(self, rank: int) -> str | None:
        return self.gone.get(rank)

    def join(self, joiner: tuple[int, Callable[[], None]]) -> None:
        """A pending rank joins, and begins its program."""
        rank, program = joiner
        del self.gone[rank]
        self.present.join(rank)
        self.ranks[rank].begin(program)

    def leave(self, rank: int) -> None:
        """A clean exit of a rank."""
        self.gone[rank] = "left"
        self.present.leave(rank)
        self._announce(rank, "left", lost=False)

    def lose(self, rank: int, why: str) -> None:
        """A rank is lost: fence it, then notify the others."""
        if rank in self.gone:
            return
        self.gone[rank] = why
        self.present.leave(rank)
        self.lost.append((rank, why))
        for activity in self.ranks[rank].activities:
            self.kernel.kill(activity)
        for sender, _, _ in self.network.drop(rank):
            sender.sent()
        self._announce(rank, why, lost=True)

    def _announce(self, rank: int, why: str, lost: bool) -> None:
        for one in self.ranks if lost else list(self.watchers[rank]):
            if one.rank not in self.gone:
                one.notice(rank, why, lost)
        for group, call in list(self.calls.items()):
            if rank in group.group:
                del self.calls[group]
                for activity in call.waiting:
                    self.kernel.wake(activity, PeerLost(rank, why))

    def _inject(self, fault: Fault) -> None:
        if isinstance(fault, Slow):
            for rank in fault.ranks:
                self.ranks[rank].speed /= fault.factor
        elif isinstance(fault, SlowLink):
            self.network.slow(fault.rank, fault.factor)
        else:
            self.lose(fault.rank, fault.why)


@dataclass(frozen=True)
class Simulation:
    """The outcome of a run in virtual time."""

    results: list[Any]
    seconds: float
    bytes: list[int]
    rounds: int
    events: int
    lost: list[tuple[int, str]]


def simulate(cluster: Cluster, program: Callable[[Transport], Any], seed: int = 0) -> Simulation:
    """Run `program` on every rank of the cluster until all have ended."""
    with _one_thread(), rare_collections(max(YOUNG, YOUNG_PER_RANK * cluster.size)):
        return _simulate(World(cluster, seed), program)


def _simulate(world: World, program: Callable[[Transport], Any]) -> Simulation:
    cluster = world.cluster
    results: list[Any] = [None] * cluster.size

    def main(rank: VirtualTransport) -> Callable[[], None]:
        def run() -> None:
            results[rank.rank] = program(rank)

        return run

    for rank in world.ranks:
        if rank.rank in cluster.pending_ranks:
            at = seconds(cluster.newcomers[cluster.pending_ranks.index(rank.rank)])
            world.kernel.at(at, world.join, (rank.rank, main(rank)))
        else:
            rank.begin(main(rank))
    world.kernel.run()
    sent = [rank.bytes_sent for rank in world.ranks]
    depth = max(rank.depth for rank in world.ranks)
    return Simulation(results, world.kernel.now, sent, depth, world.kernel.events, world.lost)


@contextmanager
def _one_thread() -> Iterator[None]:
    """One thread for torch: ranks do not compute side by side, and results do not depend on the machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def on_ranks(ranks: int, program: Callable[[Transport], Any], cluster: Cluster | None = None) -> Simulation:
    """Run a function on some virtual ranks and count bytes and rounds, to study collectives."""
    return simulate(cluster or Cluster(workers=ranks), program)
