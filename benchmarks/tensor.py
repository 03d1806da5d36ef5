"""A step of a divided model on 2 ranks: tensor parallel over torch's parallelize_module, fully sharded over FSDP2.

tensor-over-torch          3 pairs of linear layers of width 512, 32 rows; a column and a row split in turn
tensor-large-over-torch    the same of width 1024, 256 rows
sharded-over-fsdp2         fully sharded, MLP of 10 M parameters, 64 samples per rank; each linear layer by itself
sharded-memory-over-bsp    the peak of a rank's memory in a step of Adam, 24 linear layers of 1024, over that of bsp;
                           each rank is a host of its own
one-weird-trick-over-bsp   convolutions and 13 M parameters of fully connected layers, 32 samples per rank, 1 Gbit/s;
                           bytes_over: the bytes sent, as a ratio

Layers, data, seeds, loss and optimizer are the same on both sides, and every process has one thread. Except where hosts
are named, our side goes through shared memory, torch through gloo on loopback. Memory is resident memory beyond that of
the same run with layers of width 8.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from _hosts import Hosts
from _models import BATCHES, LEARNING_RATE, SEED, batches, model, own_loop, plain_step
from _ranks import RANKS, Commands, Pair, Side, free_ports
from _side_by_side import measure, say, slowness
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import manyhands as mh
from manyhands.core.strategy import Strategy
from manyhands.report.progress import Progress
from manyhands.rules import Adam

PAIRS = 3


class Case(NamedTuple):
    """A tensor parallel network: width of its layers, rows of a mini-batch, and its goal."""

    name: str
    width: int
    rows: int
    goal: str
    steps: int


CASES = [
    Case("tensor", 512, 32, "<= 0.80", steps=20),
    Case("tensor-large", 1024, 256, "<= 0.97", steps=3),
]

# -- tensor parallel ----------------------------------------------------------------------------------


def pairs(width: int) -> nn.Sequential:
    """The layers, with the weights they have on both sides."""
    torch.manual_seed(SEED)
    layers = [part for _ in range(2 * PAIRS) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def same_batches(shape: tuple[int, ...], rows: int, classes: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Mini-batches without end, the same on all ranks."""
    numbers = torch.Generator().manual_seed(SEED)
    xs = torch.randn(BATCHES, rows, *shape, generator=numbers)
    ys = torch.randint(classes, (BATCHES, rows), generator=numbers)
    return itertools.cycle(list(zip(xs, ys, strict=True)))


def tensor_ours(width: str, rows: str, commands: Commands) -> None:
    """Our side."""
    data = same_batches((int(width),), int(rows), int(width))
    strategy = mh.tensor_parallel(lr=LEARNING_RATE)
    own_loop("shm", strategy, pairs(int(width)), functional.cross_entropy, data, commands)


def tensor_torch(width: str, rows: str, commands: Commands) -> None:
    """The peer: column-wise and row-wise layers in turn."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    dist.init_process_group("gloo")
    ways: list[Callable[[], Any]] = [ColwiseParallel, RowwiseParallel]
    plan = {str(2 * number): ways[number % 2]() for number in range(2 * PAIRS)}
    net = parallelize_module(pairs(int(width)), dist.init_device_mesh("cpu", (RANKS,)), plan)
    commands.repeat(plain_step(net, same_batches((int(width),), int(rows), int(width))))
    dist.destroy_process_group()
    os._exit(0)  # gloo sometimes aborts while the interpreter exits; everything is measured by now


def tensor(case: Case) -> dict[str, Any]:
    """One line of the result."""
    words = str(case.width), str(case.rows)
    sides = [Side("torch", tensor_torch, words), Side("ours", tensor_ours, words)]
    seconds = measure(case.name, sides, steps=case.steps)
    return slowness(f"{case.name}-over-torch", seconds["ours"], seconds["torch"], case.goal)


# -- fully sharded ------------------------------------------------------------------------------------


def sharded_ours(commands: Commands) -> None:
    """Our side; each linear layer is a unit."""
    strategy = mh.fully_sharded(lr=LEARNING_RATE, unit=1)
    own_loop("shm", strategy, model("mlp"), functional.cross_entropy, batches("mlp"), commands)


def sharded_torch(commands: Commands) -> None:
    """The peer: FSDP2, each linear layer and then the whole."""
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    net, mesh = model("mlp"), dist.init_device_mesh("cpu", (RANKS,))
    for layer in [layer for layer in net.modules() if isinstance(layer, nn.Linear)]:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    commands.repeat(plain_step(net, batches("mlp")))
    dist.destroy_process_group()
    os._exit(0)


def sharded() -> dict[str, Any]:
    """One line of the result."""
    seconds = measure("sharded", [Side("fsdp2", sharded_torch), Side("ours", sharded_ours)], steps=5)
    return slowness("sharded-over-fsdp2", seconds["ours"], seconds["fsdp2"], "<= 0.80")


# -- memory -------------------------------------------------------------------------------------------

MEASURED: dict[str, Callable[..., Strategy]] = {"bsp": mh.bsp, "sharded": partial(mh.fully_sharded, unit=1)}
WIDTH, LAYERS, ROWS = 1024, 24, 16
TINY = 8
"""The width of a model without a size: the memory of all that is not its tensors."""


class PeakMemory:
    """Reports bytes instead of seconds: the peak of the resident memory in the steps."""

    def __init__(self, commands: Commands) -> None:
        self._commands = commands

    def repeat(self, step: Callable[[], object]) -> None:
        """Run as often as the coordinator asks, and report."""
        while (steps := self._commands.wait()) is not None:
            ctypes.CDLL(None).malloc_trim(0)  # return what was freed, which a rank keeps
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
            for _ in range(steps):
                step()
            found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
            assert found is not None
            self._commands.report(1024.0 * int(found[1]))


def memory_of(name: str, width: str, commands: Commands) -> None:
    """A side that reports its memory."""
    meter: Any = PeakMemory(commands)
    torch.manual_seed(SEED)
    net = nn.Sequential(*(part for _ in range(LAYERS) for part in (nn.Linear(int(width), int(width)), nn.ReLU())))
    data = same_batches((int(width),), ROWS, int(width))
    own_loop("tcp", MEASURED[name](rule=Adam(LEARNING_RATE)), net, functional.cross_entropy, data, meter)


def peak(name: str, width: int) -> float:
    """Bytes of the rank that has the most."""
    with Pair(Side(name, memory_of, (name, str(width))), free_ports(1)[0]) as pair:
        pair.run(2)
        return median(pair.run(3) for _ in range(3))


def memory() -> dict[str, Any]:
    """One line of the result, in megabytes."""
    ours, peer = ((peak(name, WIDTH) - peak(name, TINY)) / 1e6 for name in ("sharded", "bsp"))
    result = {"name": "sharded-memory-over-bsp", "value": round(ours / peer, 3), "goal": "<= 0.65"}
    say(f"{result['name']}: {result['value']}, ours {ours:.1f} MB, bsp {peer:.1f} MB")
    return {**result, "ours_mb": round(ours, 1), "peer_mb": round(peer, 1)}


# -- one weird trick ----------------------------------------------------------------------------------

IMAGE, CLASSES, SAMPLES, MBIT = (3, 32, 32), 10, 32, 1000
DIVIDED: dict[str, Callable[..., Strategy]] = {
    "bsp": mh.bsp,
    "one-weird-trick": mh.one_weird_trick,
}


def alexnet_like() -> nn.Sequential:
    """Convolutions with 0.1 M parameters, fully connected layers with 12.6 M."""
    torch.manual_seed(SEED)
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64 * 8 * 8, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU()),
        nn.Linear(2048, CLASSES),
    )


def images() -> TensorDataset:
    """The samples of all ranks."""
    numbers = torch.Generator().manual_seed(SEED)
    x = torch.randn(BATCHES * RANKS * SAMPLES, *IMAGE, generator=numbers)
    return TensorDataset(x, torch.randint(CLASSES, (len(x),), generator=numbers))


def of_rank(name: str, rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Mini-batches without end: a part of each with bsp; a team gets the whole, and divides it for the convolutions."""
    wholes = zip(*(field.split(RANKS * SAMPLES) for field in images().tensors), strict=True)
    if name == "bsp":
        return itertools.cycle([(x.split(SAMPLES)[rank], y.split(SAMPLES)[rank]) for x, y in wholes])
    return itertools.cycle(list(wholes))


def divided(name: str, commands: Commands) -> None:
    """A method between two hosts."""
    data, strategy = of_rank(name, int(os.environ["RANK"])), DIVIDED[name](lr=LEARNING_RATE)
    own_loop("tcp", strategy, alexnet_like(), functional.cross_entropy, data, commands)


def bytes_of(name: str, steps: int = 2) -> float:
    """Bytes of a step of all ranks: of a run in virtual time, beyond those of a shorter one."""
    samples = SAMPLES if name == "bsp" else RANKS * SAMPLES
    task = mh.Task(alexnet_like, images(), functional.cross_entropy, batch_size=samples)
    runs = [
        mh.train(task, DIVIDED[name](lr=LEARNING_RATE), cluster=mh.Cluster(RANKS), steps=count).bytes_sent
        for count in (1, 1 + steps)
    ]
    return (runs[1] - runs[0]) / steps


def weird() -> dict[str, Any]:
    """One line of the result, with the bytes of a step."""
    with ExitStack() as stack:
        hosts = stack.enter_context(Hosts([MBIT] * RANKS))
        sides = [Side(name, divided, (name,), hosts=hosts) for name in DIVIDED]
        seconds = measure("one weird trick 1 Gbit/s", sides, steps=3, rounds=9)
    result = slowness("one-weird-trick-over-bsp", seconds["one-weird-trick"], seconds["bsp"], "<= 0.5")
    ours, peer = (bytes_of(name) for name in ("one-weird-trick", "bsp"))
    sizes = {"ours_mb": round(ours / 1e6, 2), "peer_mb": round(peer / 1e6, 2), "bytes_over": round(ours / peer, 3)}
    say(f"one-weird-trick-over-bsp: {sizes['ours_mb']} MB sent in a step, bsp {sizes['peer_mb']} MB")
    return {**result, **sizes}


def run(progress: Progress) -> list[dict[str, Any]]:
    """Every case, both sides in one run. Rounds are printed to stderr, because `progress` counts samples."""
    return [*(tensor(case) for case in CASES), sharded(), memory(), weird()]
