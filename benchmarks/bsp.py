"""A step of bsp with 2 workers on one machine, over torch's DDP on gloo.

mlp-shm                 through shared memory, MLP of 10 M parameters: our time over DDP's
cnn-shm                 the same, small CNN
mlp-tcp                 through TCP sockets, MLP
mlp-no-communication    the lower bound: two workers without communication, over DDP
cnn-no-communication    the same, small CNN

Model, data, seeds, batch size and plain SGD are the same on all sides, and every process has one thread.
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from _models import LEARNING_RATE, alone, batches, model, plain_step, together
from _ranks import Commands, Side
from _side_by_side import measure, slowness
from torch.nn.parallel import DistributedDataParallel

import manyhands as mh
from manyhands.report.progress import Progress


def ours(link: str, model_name: str, commands: Commands) -> None:
    """Our side: bsp over `link`, "shm" or "tcp"."""
    together(link, mh.bsp(lr=LEARNING_RATE), model_name, commands)


def ddp(model_name: str, commands: Commands) -> None:
    """The peer: stock DDP on gloo."""
    dist.init_process_group("gloo")
    net = DistributedDataParallel(model(model_name), gradient_as_bucket_view=True)
    commands.repeat(plain_step(net, batches(model_name)))
    dist.destroy_process_group()
    os._exit(0)  # gloo sometimes aborts while the interpreter exits; everything is measured by now


def run(progress: Progress) -> list[dict[str, Any]]:
    """Both models. Rounds are printed to stderr, because `progress` counts samples."""
    mlp = measure("bsp mlp", sides("mlp", "shm", "tcp"), steps=5)
    cnn = measure("bsp cnn", sides("cnn", "shm"), steps=20)
    return [
        slowness("mlp-shm", mlp["shm"], mlp["ddp"], "<= 0.90"),
        slowness("cnn-shm", cnn["shm"], cnn["ddp"], "<= 0.95"),
        slowness("mlp-tcp", mlp["tcp"], mlp["ddp"], "<= 1.15"),
        slowness("mlp-no-communication", mlp["floor"], mlp["ddp"]),
        slowness("cnn-no-communication", cnn["floor"], cnn["ddp"]),
    ]


def sides(model_name: str, *links: str) -> list[Side]:
    """The sides: DDP, ours over every link, and no communication."""
    through = [Side(link, ours, (link, model_name)) for link in links]
    return [Side("ddp", ddp, (model_name,)), *through, Side("floor", alone, (model_name,))]
