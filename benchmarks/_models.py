"""The models and data that both sides of a benchmark train, and a plain step of training.

mlp    784-2048-2048-2048-10, 10 M parameters, 64 samples per worker
cnn    three convolutions and two layers on 28 x 28 pixels, 0.4 M parameters, 32 samples per worker
small  64-128-10, 9,600 parameters, so little work that every microsecond of overhead is measurable
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from _ranks import Commands
from torch import Tensor, nn
from torch.nn import functional

import manyhands as mh
from manyhands.core.strategy import Strategy

LEARNING_RATE = 0.01
SEED = 0
BATCHES = 32
"""Mini-batches of every worker; it uses them repeatedly."""

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    """A model, the shape of a sample, and samples per worker and step."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    batch_size: int


def _mlp(*widths: int) -> nn.Sequential:
    layers = [part for pair in itertools.pairwise(widths) for part in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def _cnn() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(64 * 7 * 7, 128), nn.ReLU(), nn.Linear(128, 10)),
    )


CASES = {
    "mlp": Case(lambda: _mlp(784, 2048, 2048, 2048, 10), (784,), 64),
    "cnn": Case(_cnn, (1, 28, 28), 32),
    "small": Case(lambda: _mlp(64, 128, 10), (64,), 512),
}


def model(name: str) -> nn.Module:
    """The model with the weights it has on every side and rank."""
    torch.manual_seed(SEED)
    return CASES[name].build()


def batches(name: str, rank: int | None = None) -> Iterator[Batch]:
    """This rank's mini-batches without end, the same on every side."""
    case = CASES[name]
    here = int(os.environ["RANK"]) if rank is None else rank
    numbers = torch.Generator().manual_seed(1000 * SEED + here)
    xs = torch.randn(BATCHES, case.batch_size, *case.shape, generator=numbers)
    ys = torch.randint(10, (BATCHES, case.batch_size), generator=numbers)
    return itertools.cycle(list(zip(xs, ys, strict=True)))


def plain_step(
    net: nn.Module, data: Iterator[Batch], optimizer: torch.optim.Optimizer | None = None
) -> Callable[[], None]:
    """A plain step: forward, backward, SGD. Wrapped in DDP or prepared, `net` averages its gradients itself."""
    optimizer = optimizer or torch.optim.SGD(net.parameters(), lr=LEARNING_RATE)

    def step() -> None:
        x, y = next(data)
        optimizer.zero_grad()
        functional.cross_entropy(net(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def alone(name: str, commands: Commands) -> None:
    """A side without communication: the lower bound."""
    commands.repeat(plain_step(model(name), batches(name)))


def together(link: str, strategy: Strategy, name: str, commands: Commands) -> None:
    """Our side: the same model and data with `mh.join`."""
    own_loop(link, strategy, model(name), functional.cross_entropy, batches(name), commands)


def own_loop(
    link: str,
    strategy: Strategy,
    net: nn.Module,
    loss: Callable[..., Tensor],
    data: Iterator[tuple[Tensor, ...]],
    commands: Commands,
) -> None:
    """Train any model and data with `mh.join`."""
    os.environ["MANYHANDS_LINK"] = link
    with mh.join(net, loss=loss, strategy=strategy) as hands:
        commands.repeat(lambda: hands.step(*next(data)))
