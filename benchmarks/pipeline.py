"""A step of a pipeline of 2 stages that flushes, over torch.distributed.pipelining on gloo with the same schedule.

gpipe-m8-over-torch            8 linear layers of 1024, 256 samples in 8 micro-batches; no replay, as torch has none
gpipe-m16-over-torch           the same in 16
gpipe-small-over-torch         8 linear layers of 256, 64 samples in 8: mostly the cost of messages and of Python
1f1b-m8-over-torch             1F1B, in 8 and 16
1f1b-m16-over-torch
interleaved-m8-over-torch      interleaved 1F1B, 2 stages of 2 layers in each process
zero-bubble-m8-over-torch      zero bubble (H1): torch's interleaved one with one stage in each process
gpipe-m8-no-communication      for each of them: both processes compute their stages alone, over torch's schedule
...
pipedream-over-1f1b-m4         samples per second of PipeDream over those of 1F1B in 4, with equal micro-batches of 64
pipedream-no-communication     the same of both processes alone
cut-over-chain                 gpipe in 8: the layers in a module that is cut by running it, over an nn.Sequential
bubble-error                   predicted idle share of gpipe and 1f1b in 8 and 16 against the measured one, the largest
memory-error                   predicted bytes of a rank against the measured ones, the largest of several methods

Layers, data, seeds, micro-batches, loss and plain SGD are the same on both sides, and every process has one thread.
Our side goes through shared memory. The last two lines are runs of `mh.train`.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from _models import BATCHES, LEARNING_RATE, SEED, own_loop
from _predicted import bubble_error, memory_error
from _ranks import RANKS, Commands, Side
from _side_by_side import measure, slowness, speed
from torch import Tensor, nn
from torch.nn import functional

import manyhands as mh
from manyhands.core.strategy import Strategy
from manyhands.report.progress import Progress
from manyhands.run.methods import over_team

LAYERS = 8
WIDTH, PIECE, PIECES = "1024", 64, 4
"""Of the lines that compare two of ours: the layers, the samples of a micro-batch, and how many 1F1B has."""


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


def stream(width: str, samples: str, commands: Commands) -> None:
    """Our side without a flush: PipeDream."""
    data = batches(int(width), int(samples))
    own_loop("shm", mh.pipedream(lr=LEARNING_RATE), network(int(width)), functional.cross_entropy, data, commands)


class Plain(nn.Module):
    """The same layers in a module that is no nn.Sequential."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(network(width))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def cut(width: str, samples: str, micro_batches: str, commands: Commands) -> None:
    """Our side with a module that is cut by running it."""
    data = batches(int(width), int(samples))
    team = mh.piped(RANKS, micro_batches=int(micro_batches), keep="graph", example=next(data)[:1])
    strategy = over_team(mh.bsp(lr=LEARNING_RATE), team)
    own_loop("shm", strategy, Plain(int(width)), functional.cross_entropy, data, commands)


def own_parts(schedule: str, width: int, rank: int) -> dict[int, nn.Sequential]:
    """The stages of a rank, equal parts of the layers."""
    layers, count = list(network(width)), RANKS * (2 if schedule == "interleaved" else 1)
    each = 2 * LAYERS // count
    return {s: nn.Sequential(*layers[s * each : (s + 1) * each]) for s in range(rank, count, RANKS)}


def alone(schedule: str, width: str, samples: str, micro_batches: str, commands: Commands) -> None:
    """No communication: the stages of this rank on inputs and errors that are there already."""
    rank = int(os.environ["RANK"])
    parts = own_parts(schedule, int(width), rank)
    optimizer = torch.optim.SGD([p for part in parts.values() for p in part.parameters()], lr=LEARNING_RATE)
    data = batches(int(width), int(samples))

    def step() -> None:
        x, y = next(data)
        optimizer.zero_grad()
        for micro, target in zip(x.chunk(int(micro_batches)), y.chunk(int(micro_batches)), strict=True):
            for s, part in parts.items():
                received = micro.detach().requires_grad_(s > 0)
                out = part(received)
                if s == RANKS * len(parts) - 1:
                    functional.cross_entropy(out, target).backward()  # type: ignore[no-untyped-call]
                else:
                    out.backward(micro)
        optimizer.step()

    commands.repeat(step)


def peer(schedule: str, width: str, samples: str, micro_batches: str, commands: Commands) -> None:
    """The peer: torch's schedule, on gloo."""
    from torch.distributed import pipelining

    dist.init_process_group("gloo")
    rank, parts = dist.get_rank(), own_parts(schedule, int(width), dist.get_rank())
    count = RANKS * len(parts)
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
    """Every case, all sides in one run. Rounds are printed to stderr, because `progress` counts samples."""
    lines = [line for case in CASES for line in compare(case)]
    return [*lines, *streams(), *cuts(), bubble_error(), memory_error()]


def compare(case: Case) -> list[dict[str, Any]]:
    """The line of a case, and its floor."""
    words = case.schedule, *map(str, (case.width, case.samples, case.micro_batches))
    sides = [Side("torch", peer, words), Side("ours", ours, words), Side("floor", alone, words)]
    seconds = measure(f"pipeline {case.name}", sides, steps=case.steps)
    return [
        slowness(f"{case.name}-over-torch", seconds["ours"], seconds["torch"], case.goal),
        slowness(f"{case.name}-no-communication", seconds["floor"], seconds["torch"]),
    ]


def streams() -> list[dict[str, Any]]:
    """A step of 1F1B has as many samples as `PIECES` steps of PipeDream."""
    large = str(PIECES * PIECE)
    sides = [
        Side("1f1b", ours, ("1f1b", WIDTH, large, str(PIECES))),
        Side("pipedream", stream, (WIDTH, str(PIECE))),
        Side("floor", alone, ("1f1b", WIDTH, large, str(PIECES))),
    ]
    seconds = measure("pipeline pipedream", sides, steps=3 * PIECES)
    pipedream = [PIECES * each for each in seconds["pipedream"]]
    return [
        speed("pipedream-over-1f1b-m4", pipedream, seconds["1f1b"], ">= 1.15"),
        speed("pipedream-no-communication", seconds["floor"], seconds["1f1b"]),
    ]


def cuts() -> list[dict[str, Any]]:
    """The same layers, cut in two ways."""
    words = WIDTH, "256", "8"
    sides = [Side("chain", ours, ("gpipe", *words)), Side("cut", cut, words)]
    seconds = measure("pipeline cut", sides, steps=3)
    return [slowness("cut-over-chain", seconds["cut"], seconds["chain"], "<= 1.05")]
