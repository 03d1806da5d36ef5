"""An all-reduce between 2 ranks, over gloo's.

shm-25mb-over-gloo                     25 MB on one host, through shared memory: our time over gloo's
best-4kb-over-gloo                     4 KB on one host, the fastest of our algorithms and links
sparcml-1pct-over-gloo-dense-1gbit     25 MB between two hosts with 1 Gbit/s, of which the largest 1 % are sent; gloo
                                       sends everything

The sparse sum includes the selection of the largest entries and error feedback.
"""

from __future__ import annotations

import os
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from _hosts import Hosts
from _ranks import Commands, Side
from _side_by_side import measure, slowness
from torch import nn

import manyhands as mh
from manyhands.codecs import Feedback, TopK
from manyhands.collectives import collective
from manyhands.collectives.compressed import Sparcml
from manyhands.core.flat import Span
from manyhands.core.worker import Worker
from manyhands.report.progress import Progress
from manyhands.runtime.launch import join

LARGE, SMALL = 6_250_000, 1_000
"""float32: 25 MB and 4 KB."""
WAYS = {"shm": ("shm", "auto"), "butterfly-shm": ("shm", "butterfly"), "butterfly-tcp": ("tcp", "butterfly")}
"""The link and the algorithm of each side of ours."""


def ours(link: str, algorithm: str, numel: str, commands: Commands) -> None:
    """One of our collectives."""
    os.environ["MANYHANDS_LINK"] = link
    transport = join.connect()
    group, x = collective(algorithm, transport, range(2)), torch.zeros(int(numel))
    commands.repeat(lambda: group.all_reduce(x))
    transport.leave()


def gloo(numel: str, commands: Commands) -> None:
    """The peer: gloo's all-reduce."""
    dist.init_process_group("gloo")
    x = torch.zeros(int(numel))
    commands.repeat(lambda: dist.all_reduce(x))
    dist.destroy_process_group()
    os._exit(0)  # gloo sometimes aborts while the interpreter exits; everything is measured by now


def sparse(commands: Commands) -> None:
    """The sum of the largest hundredth of a vector, which differs between ranks."""
    transport = join.connect()
    worker = Worker(transport, mh.Task(model=Vector, data=[0]), Vector(), seed=0, steps=0, batch_size=1)
    total = Sparcml(worker, Feedback(TopK(0.01)))
    g = torch.randn(LARGE, generator=torch.Generator().manual_seed(transport.rank))
    x, span = torch.empty(LARGE), Span(0, 0, LARGE)
    commands.repeat(lambda: total.all_reduce(x.copy_(g), span))
    transport.leave()


class Vector(nn.Module):
    """A model with one parameter vector."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(LARGE))


def run(progress: Progress) -> list[dict[str, Any]]:
    """Measure all sides. Rounds are printed to stderr, because `progress` counts samples."""
    large = measure(
        "25 MB", [Side("gloo", gloo, (str(LARGE),)), Side("shm", ours, (*WAYS["shm"], str(LARGE)))], steps=10
    )
    ways = [Side(name, ours, (*words, str(SMALL))) for name, words in WAYS.items()]
    small = measure("4 KB", [Side("gloo", gloo, (str(SMALL),)), *ways], steps=500)
    best = min(WAYS, key=lambda name: median(small[name]))
    with Hosts([1000, 1000]) as hosts:
        sides = [Side("gloo", gloo, (str(LARGE),), hosts=hosts), Side("sparcml", sparse, hosts=hosts)]
        wire = measure("25 MB at 1 Gbit/s", sides, steps=3, rounds=9)
    return [
        slowness("shm-25mb-over-gloo", large["shm"], large["gloo"], "<= 0.5"),
        slowness("best-4kb-over-gloo", small[best], small["gloo"], "<= 0.6"),
        slowness("sparcml-1pct-over-gloo-dense-1gbit", wire["sparcml"], wire["gloo"], "<= 0.2"),
    ]
