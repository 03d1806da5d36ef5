"""The virtual world: builds a cluster's ranks, plays their programs, breaks what is to break."""

from __future__ import annotations

import gc
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from manyhands.core.errors import ManyhandsError, PeerLost
from manyhands.core.protocols import Transport
from manyhands.virtual.cluster import Cluster
from manyhands.virtual.cores import Cores
from manyhands.virtual.faults import Fault, Slow, SlowLink
from manyhands.virtual.kernel import Activity, Kernel
from manyhands.virtual.links import Network
from manyhands.virtual.messages import VirtualMessage
from manyhands.virtual.native import Meeting, Room
from manyhands.virtual.presence import Presence
from manyhands.virtual.transport import VirtualTransport
from manyhands.virtual.units import bytes_per_second, seconds

YOUNG = 100_000
"""How many objects may be new before Python looks for cycles among them."""


class World:
    """One cluster in one run."""

    def __init__(self, cluster: Cluster, seed: int = 0) -> None:
        self.cluster = cluster
        self.seed = seed
        self.kernel = Kernel()
        self.hosts = cluster.placement()
        self.lost: list[tuple[int, str]] = []
        self.locks: dict[tuple[int, str], deque[Activity]] = {}
        self.rooms: dict[Sequence[int], Room] = {}
        self.meetings: dict[Room, Meeting] = {}
        self.gone: dict[int, str] = dict.fromkeys(cluster.late, "it has not come yet")
        """Why a rank is not there."""
        self.watchers: dict[int, dict[VirtualTransport, int]] = {rank: {} for rank in range(-1, cluster.size)}
        """Who waits for a rank right now (ANY is -1)."""
        self._memory: dict[tuple[int, str], Tensor] = {}
        self._latency = seconds(cluster.latency), seconds(cluster.local_latency)
        self._rate = bytes_per_second(cluster.bandwidth), bytes_per_second(cluster.local_bandwidth)
        self.network = self._links()
        ranks_of = Counter(self.hosts)
        self.cores = {host: Cores(self.kernel, cluster.cores or ranks) for host, ranks in ranks_of.items()}
        others = cluster.size - cluster.workers
        speeds = [*(cluster.speeds or [1.0] * cluster.workers), *([1.0] * others)]
        self.roles = ["worker"] * (cluster.size - cluster.servers) + ["server"] * cluster.servers
        self.present = Presence(self.roles, cluster.late)
        self.ranks = [VirtualTransport(self, rank, speeds[rank]) for rank in range(cluster.size)]
        self._foresee_faults()

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

    def _foresee_faults(self) -> None:
        cluster = self.cluster
        for fault in [*cluster.slow, *(one for one in cluster.faults if not isinstance(one, Slow))]:
            if isinstance(fault, Slow | SlowLink) and not seconds(fault.at):
                self._break(fault)  # in force before anybody begins
            else:
                self.kernel.at(seconds(fault.at), self._break, fault)

    def turns(self, rank: int) -> Iterator[float] | None:
        """When this rank's gradients end, if the cluster prescribes an order of events."""
        if self.cluster.turns is not None:
            return iter(lambda: self.kernel.now, None)
        if self.cluster.order is not None:
            return (place + 1.0 for place, who in enumerate(self.cluster.order) if who == rank)
        return None

    def link(self, group: Sequence[int]) -> tuple[float, float]:
        """Latency and bytes per second among these ranks."""
        local = len({self.hosts[rank] for rank in group}) == 1
        return self._latency[local], self._rate[local]

    def shared(self, host: int, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        """One memory per host and name."""
        memory = self._memory.get((host, name))
        if memory is None:
            memory = self._memory[host, name] = torch.zeros(numel, dtype=dtype)
        if memory.numel() != numel or memory.dtype != dtype:
            raise ManyhandsError(f"shared memory {name!r} has {memory.numel()} {memory.dtype}, not {numel} {dtype}")
        return memory

    def _deliver(self, parcel: tuple[VirtualTransport, int, VirtualMessage]) -> None:
        sender, to, message = parcel
        if sender.rank in self.gone and self.gone[sender.rank] != "left":
            return
        sender.sent()
        if to not in self.gone:
            self.ranks[to].deliver(message)

    # -- membership -------------------------------------------------------------------------------

    def why_gone(self, rank: int) -> str | None:
        return self.gone.get(rank)

    def come(self, newcomer: tuple[int, Callable[[], None]]) -> None:
        """A rank is there from now on, and begins its program."""
        rank, program = newcomer
        del self.gone[rank]
        self.present.come(rank)
        self.ranks[rank].begin(program)

    def leave(self, rank: int) -> None:
        """A rank says good-bye."""
        self.gone[rank] = "left"
        self.present.go(rank)
        self._announce(rank, "left", lost=False)

    def lose(self, rank: int, why: str) -> None:
        """A rank is gone for good: fence it, then tell the others."""
        if rank in self.gone:
            return
        self.gone[rank] = why
        self.present.go(rank)
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
        for room, meeting in list(self.meetings.items()):
            if rank in room.group:
                del self.meetings[room]
                for activity in meeting.waiting:
                    self.kernel.wake(activity, PeerLost(rank, why))

    def _break(self, fault: Fault) -> None:
        if isinstance(fault, Slow):
            for rank in fault.ranks:
                self.ranks[rank].speed /= fault.factor
        elif isinstance(fault, SlowLink):
            self.network.slow(fault.rank, fault.factor)
        else:
            self.lose(fault.rank, fault.why)


@dataclass(frozen=True)
class Simulation:
    """What came out of a run in virtual time."""

    results: list[Any]
    seconds: float
    bytes: list[int]
    rounds: int
    events: int
    lost: list[tuple[int, str]]


def simulate(cluster: Cluster, program: Callable[[Transport], Any], seed: int = 0) -> Simulation:
    """Run `program` on every rank of the cluster until all have ended."""
    world = World(cluster, seed)
    results: list[Any] = [None] * cluster.size

    def main(rank: VirtualTransport) -> Callable[[], None]:
        def run() -> None:
            results[rank.rank] = program(rank)

        return run

    for rank in world.ranks:
        if rank.rank in cluster.late:
            at = seconds(cluster.newcomers[cluster.late.index(rank.rank)])
            world.kernel.at(at, world.come, (rank.rank, main(rank)))
        else:
            rank.begin(main(rank))
    with _at_ease():
        world.kernel.run()
    sent = [rank.bytes_sent for rank in world.ranks]
    depth = max(rank.depth for rank in world.ranks)
    return Simulation(results, world.kernel.now, sent, depth, world.kernel.events, world.lost)


@contextmanager
def _at_ease() -> Iterator[None]:
    """One thread for torch; and Python looks for cycles more seldom.

    What ranks have on its way lives for a moment, but outlives many a search of the usual kind, and is then taken for
    something that stays: so everything that stays is searched again and again.
    """
    threads, thresholds = torch.get_num_threads(), gc.get_threshold()
    torch.set_num_threads(1)
    gc.set_threshold(max(thresholds[0], YOUNG) if thresholds[0] else 0, *thresholds[1:])
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        gc.set_threshold(*thresholds)


def on_ranks(ranks: int, program: Callable[[Transport], Any], cluster: Cluster | None = None) -> Simulation:
    """Run a function on some virtual ranks and count bytes and rounds: for studying collectives."""
    return simulate(cluster or Cluster(workers=ranks), program)
