"""A step of a pipeline of 2 stages that flushes, over torch.distributed.pipelining on gloo with the same schedule.

gpipe-m8-over-torch            8 linear layers of 1024, 256 samples in 8 micro-batches; no replay, as torch has none
gpipe-m16-over-torch           the same in 16
gpipe-small-over-torch         8 linear layers of 256, 64 samples in 8: mostly the cost of messages and of Python
1f1b-m8-over-torch             1F1B, in 8 and 16
1f1b-m16-over-torch
interleaved-m8-over-torch      interleaved 1F1B, 2 stages of 2 layers in each process
zero-bubble-m8-over-torch      zero bubble (H1): torch's interleaved one with one stage in each process

Layers, data, seeds, micro-batches, loss and plain SGD are the same on both sides, and every process has one thread.
Our side goes through shared memory.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from _models import BATCHES, LEARNING_RATE, SEED, own_loop
from _ranks import RANKS, Commands, Side
from _side_by_side import measure, slowness
from torch import Tensor, nn
from torch.nn import functional

import manyhands as mh
from manyhands.core.strategy import Strategy
from manyhands.report.progress import Progress

LAYERS = 8


class Case(NamedTuple):
    """One line of the result: schedule, width of the layers, samples, micro-batches, and its goal."""

    name: str
    schedule: str
    width: int
    samples: int
    micro_batches: int
    goal: str
    steps: int = 3


CASES = [
    Case("gpipe-m8", "gpipe", 1024, 256, 8, "<= 0.88"),
    Case("gpipe-m16", "gpipe", 1024, 256, 16, "<= 0.85"),
    Case("gpipe-small", "gpipe", 256, 64, 8, "<= 0.65", steps=20),
    Case("1f1b-m8", "1f1b", 1024, 256, 8, "<= 0.90"),
    Case("1f1b-m16", "1f1b", 1024, 256, 16, "<= 0.90"),
    Case("interleaved-m8", "interleaved", 1024, 256, 8, "<= 0.90"),
    Case("zero-bubble-m8", "zero-bubble", 1024, 256, 8, "<= 0.85"),
]

OURS: dict[str, Callable[..., Strategy]] = {
    "gpipe": lambda **knobs: mh.gpipe(replay=False, **knobs),
    "1f1b": mh.one_f_one_b,
    "interleaved": mh.interleaved,
    "zero-bubble": mh.zero_bubble,
}


def network(width: int) -> nn.Sequential:
    """The layers, with the weights they have on both sides."""
    torch.manual_seed(SEED)
    layers = [part for _ in range(LAYERS) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def batches(width: int, samples: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The mini-batches of the pipeline, without end."""
    numbers = torch.Generator().manual_seed(SEED)
    xs = torch.randn(BATCHES, samples, width, generator=numbers)
    ys = torch.randint(width, (BATCHES, samples), generator=numbers)
    return itertools.cycle(list(zip(xs, ys, strict=True)))


def ours(schedule: str, width: str, samples: str, micro_batches: str, commands: Commands) -> None:
    """Our side."""
    strategy = OURS[schedule](micro_batches=int(micro_batches), lr=LEARNING_RATE)
    data = batches(int(width), int(samples))
    own_loop("shm", strategy, network(int(width)), functional.cross_entropy, data, commands)


def peer(schedule: str, width: str, samples: str, micro_batches: str, commands: Commands) -> None:
    """The peer: torch's schedule, on gloo."""
    from torch.distributed import pipelining

    dist.init_process_group("gloo")
    rank, chunks = dist.get_rank(), 2 if schedule == "interleaved" else 1
    count = RANKS * chunks
    layers = list(network(int(width)))
    each = 2 * LAYERS // count
    parts = {s: nn.Sequential(*layers[s * each : (s + 1) * each]) for s in range(rank, count, RANKS)}
    stages = [pipelining.PipelineStage(part, s, count, torch.device("cpu")) for s, part in parts.items()]
    kinds: dict[str, Any] = {
        "gpipe": pipelining.ScheduleGPipe,
        "1f1b": pipelining.Schedule1F1B,
        "interleaved": pipelining.ScheduleInterleaved1F1B,
        "zero-bubble": pipelining.ScheduleInterleavedZeroBubble,
    }
    given: Any = stages[0] if schedule in ("gpipe", "1f1b") else stages
    played = kinds[schedule](given, int(micro_batches), loss_fn=functional.cross_entropy)
    optimizer = torch.optim.SGD([p for part in parts.values() for p in part.parameters()], lr=LEARNING_RATE)
    data = batches(int(width), int(samples))

    def step() -> None:
        x, y = next(data)
        optimizer.zero_grad()
        inputs = (x,) if rank == 0 else ()
        played.step(*inputs, **({"target": y, "losses": []} if rank == RANKS - 1 else {}))
        optimizer.step()

    commands.repeat(step)
    dist.destroy_process_group()
    os._exit(0)  # gloo sometimes aborts while the interpreter exits; everything is measured by now


def run(progress: Progress) -> list[dict[str, Any]]:
    """Every case, both sides in one run. Rounds are printed to stderr, because `progress` counts samples."""
    return [compare(case) for case in CASES]


def compare(case: Case) -> dict[str, Any]:
    """One line of the result."""
    words = case.schedule, *map(str, (case.width, case.samples, case.micro_batches))
    sides = [Side("torch", peer, words), Side("ours", ours, words)]
    seconds = measure(f"pipeline {case.name}", sides, steps=case.steps)
    return slowness(f"{case.name}-over-torch", seconds["ours"], seconds["torch"], case.goal)
