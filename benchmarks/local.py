"""Wall time to a fixed loss with 2 workers on a link of 100 Mbit/s, over torch's DDP on gloo.

diloco-over-ddp             AdamW on each worker, a Nesterov step of both every 20 steps
model-averaging-over-ddp    SGD on each worker, weights averaged every 20 steps

All train the same MLP of 0.3 M parameters on `digits`, 32 samples per worker and step, until the loss over all training
samples is at most 0.1. The number of steps that each of them needs is determined first, on an unlimited link; it is
deterministic. The peer is DDP with AdamW or with SGD, whichever needs fewer steps. Then all are timed: new processes
in every round, from the first step to the last, and the loss is checked again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from _hosts import Hosts
from _ranks import Commands, Pair, Side, free_ports
from _side_by_side import say, slowness, take_turns
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import manyhands as mh
from manyhands.core.errors import ManyhandsError
from manyhands.report.progress import Progress
from manyhands.rules import Sgd
from manyhands.splits.data import Share
from manyhands.tasks import load
from manyhands.tasks.parts import mlp

TARGET = 0.1
PERIOD = 20
MOST = 2000
"""The most steps until the loss is reached."""
ROUNDS = 9
MBIT = 100
STRATEGIES = {
    "diloco": lambda: mh.diloco(period=PERIOD),
    "model-averaging": lambda: mh.model_averaging(period=PERIOD, rule=Sgd(0.3)),
}
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "ddp-adamw": lambda net: torch.optim.AdamW(net.parameters(), lr=0.003),
    "ddp-sgd": lambda net: torch.optim.SGD(net.parameters(), lr=0.3),
}
Step = Callable[[], object]


def model() -> nn.Module:
    """The model with the same weights on every side and rank."""
    torch.manual_seed(0)
    return mlp(64, 512, 512, 10)


def batches() -> Iterator[tuple[Tensor, ...]]:
    """The mini-batches of this rank, without end."""
    share = Share(load("digits").data, int(os.environ["RANK"]), 2, 32, seed=0)
    while True:
        yield share.next_batch()


def loss_of(net: nn.Module) -> float:
    """The loss over all training samples."""
    with torch.no_grad():
        x, y = load("digits").data.tensors
        return cross_entropy(net(x), y).item()


def train(name: str, steps: str, commands: Commands) -> None:
    """One side: reports the seconds of `steps` steps or, if 0, the number of steps until the target."""
    net = model()
    if name in STRATEGIES:
        with mh.join(net, loss=cross_entropy, strategy=STRATEGIES[name]()) as hands:
            data = batches()
            _train(net, lambda: hands.step(*next(data)), int(steps), commands)
    else:
        dist.init_process_group("gloo")
        _train(net, _ddp_step(net, name), int(steps), commands)
        dist.destroy_process_group()
        os._exit(0)  # gloo sometimes aborts while the interpreter exits; everything is measured by now


def _ddp_step(net: nn.Module, name: str) -> Step:
    wrapped, data = DistributedDataParallel(net, gradient_as_bucket_view=True), batches()
    optimizer = OPTIMIZERS[name](net)

    def step() -> None:
        x, y = next(data)
        optimizer.zero_grad()
        cross_entropy(wrapped(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def _train(net: nn.Module, step: Step, steps: int, commands: Commands) -> None:
    if not steps:
        commands.wait()
        commands.report(float(_steps_needed(net, step)))
        return

    def whole() -> None:
        for _ in range(steps):
            step()

    commands.repeat(whole)
    if (loss := loss_of(net)) > TARGET:
        raise ManyhandsError(f"the loss is {loss:.3f} after {steps} steps, but must be <= {TARGET}")


def _steps_needed(net: nn.Module, step: Step) -> int:
    """The loss is computed where all workers have the same weights, so that both stop at the same step."""
    for taken in range(PERIOD, MOST + 1, PERIOD):
        for _ in range(PERIOD):
            step()
        if loss_of(net) <= TARGET:
            return taken
    raise ManyhandsError(f"the loss is {loss_of(net):.3f} after {MOST} steps, but must be <= {TARGET}")


def run(progress: Progress) -> list[dict[str, Any]]:
    """Measure all sides. Rounds are printed to stderr, because `progress` counts samples."""
    with Hosts([None, None]) as fast:
        needed = {name: int(_once(Side(name, train, (name, "0"), hosts=fast))) for name in [*STRATEGIES, *OPTIMIZERS]}
    for name, steps in needed.items():
        say(f"{name} needs {steps} steps")
    peer = min(OPTIMIZERS, key=needed.__getitem__)
    with Hosts([MBIT, MBIT]) as slow:
        sides = [Side(name, train, (name, str(needed[name])), hosts=slow) for name in [peer, *STRATEGIES]]
        seconds = take_turns({side.name: lambda _, side=side: _once(side) for side in sides}, 1, ROUNDS)
    return [slowness(f"{name}-over-ddp", seconds[name], seconds[peer], "<= 0.35") for name in STRATEGIES]


def _once(side: Side) -> float:
    """The report of a side, run once in new processes."""
    with Pair(side, free_ports(1)[0]) as pair:
        return pair.run(1)
