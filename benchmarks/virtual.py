"""Speed and memory of the virtual world.

events-per-second                 100 ranks exchange small messages as fast as they can
ssp-vgg16-1000-workers-seconds    wall time of 20 steps of SSP on the sizes of VGG-16, 4 servers
bytes-per-rank-4000-over-1000     peak memory per rank with 4,000 workers over that with 1,000
bsp-10000-workers-seconds         wall time of 10 steps of BSP on the same sizes, with the closed form of a collective
ssp-10000-workers-seconds         the same of SSP, 2 servers
gossip-10000-workers-seconds      the same of gossip
peak-gib                          peak memory of a process for these three
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from statistics import median
from typing import Any

from manyhands import Cluster, ssp, train
from manyhands.core.port import Tag, Transport, recv
from manyhands.report.progress import Progress
from manyhands.tasks import load
from manyhands.virtual.world import simulate

BALL = Tag("ball")


def throw(transport: Transport) -> None:
    """Pass messages round the ring."""
    here, size = transport.rank, transport.size
    for turn in range(200):
        transport.send((here + 1) % size, BALL.of(turn), (turn,))
        recv(transport, BALL.of(turn), frm=(here - 1) % size)


def events_per_second() -> float:
    """Events of the kernel per second of wall time."""
    began = time.perf_counter()
    simulation = simulate(Cluster(workers=100), throw)
    return simulation.events / (time.perf_counter() - began)


def stale_vgg16(workers: int, steps: int, progress: Progress) -> float:
    """Wall time of SSP on sizes only."""
    cluster = Cluster(workers=workers, servers=4)
    return train(load("vgg16"), ssp(staleness=3), cluster=cluster, steps=steps, progress=progress).wall_seconds


def bytes_per_rank(workers: int, progress: Progress) -> float:
    """Peak memory that a run allocates, per worker."""
    gc.collect()
    tracemalloc.start()
    stale_vgg16(workers, 2, progress)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / workers


def crowd() -> list[dict[str, Any]]:
    """The results with 10,000 workers, from a process of their own."""
    program = [sys.executable, str(Path(__file__).with_name("_crowd.py"))]
    found = json.loads(subprocess.run(program, stdout=subprocess.PIPE, check=True, text=True).stdout)
    return [
        *(
            {"name": f"{name}-10000-workers-seconds", "value": round(seconds, 1), "goal": "<= 120"}
            for name, seconds in found["seconds"].items()
        ),
        {"name": "peak-gib", "value": round(found["peak_gib"], 2), "goal": "<= 4"},
    ]


def run(progress: Progress) -> list[dict[str, Any]]:
    """Measure all results."""
    rate = median(events_per_second() for _ in range(5))
    wall = stale_vgg16(1000, 20, progress)
    ratio = bytes_per_rank(4000, progress) / bytes_per_rank(1000, progress)
    return [
        {"name": "events-per-second", "value": round(rate), "goal": ">= 100000"},
        {"name": "ssp-vgg16-1000-workers-seconds", "value": round(wall, 2), "goal": "<= 60"},
        {"name": "bytes-per-rank-4000-over-1000", "value": round(ratio, 3), "goal": "<= 1.2"},
        *crowd(),
    ]
