"""A training step of an MLP of 10 M parameters between two hosts on a slow link, over torch's DDP on gloo.

topk-1gbit-over-ddp               top-k of 1 % with feedback, 1 Gbit/s
onebit-1gbit-over-ddp             one bit with feedback, both ways, 1 Gbit/s
topk-1gbit-over-ddp-fp16          top-k over DDP with its hook for half precision, 1 Gbit/s
topk-10gbit-over-ddp              top-k, 10 Gbit/s
no-communication-1gbit-over-ddp   the lower bound: two workers without communication

Hosts are network namespaces, links are limited by token buckets. Model, data, seeds, batch size and plain SGD are the
same on all sides, and every process has one thread.
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from _hosts import Hosts
from _models import LEARNING_RATE, alone, batches, model, plain_step, together
from _ranks import Commands, Side
from _side_by_side import measure, slowness
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import manyhands as mh
from manyhands.report.progress import Progress

STEPS, ROUNDS = 5, 9
METHODS = {
    "topk": lambda: mh.topk_sgd(lr=LEARNING_RATE, fraction=0.01),
    "onebit": lambda: mh.onebit_sgd(lr=LEARNING_RATE),
}


def ours(name: str, commands: Commands) -> None:
    """One of our methods."""
    together("tcp", METHODS[name](), "mlp", commands)


def ddp(commands: Commands) -> None:
    """The peer: stock DDP on gloo."""
    _ddp(commands, half=False)


def ddp_fp16(commands: Commands) -> None:
    """The other peer: gradients are summed in half precision."""
    _ddp(commands, half=True)


def _ddp(commands: Commands, *, half: bool) -> None:
    dist.init_process_group("gloo")
    net = DistributedDataParallel(model("mlp"), gradient_as_bucket_view=True)
    if half:
        net.register_comm_hook(None, default_hooks.fp16_compress_hook)
    commands.repeat(plain_step(net, batches("mlp")))
    dist.destroy_process_group()
    os._exit(0)  # gloo sometimes aborts while the interpreter exits; everything is measured by now


def run(progress: Progress) -> list[dict[str, Any]]:
    """Measure all sides. Rounds are printed to stderr, because `progress` counts samples."""
    with Hosts([1000, 1000]) as slow:
        peers = [Side("ddp", ddp, hosts=slow), Side("ddp-fp16", ddp_fp16, hosts=slow)]
        methods = [Side(name, ours, (name,), hosts=slow) for name in METHODS]
        floor = Side("floor", alone, ("mlp",), hosts=slow)
        one = measure("wire 1 Gbit/s", [*peers, *methods, floor], steps=STEPS, rounds=ROUNDS)
    with Hosts([10_000, 10_000]) as fast:
        sides = [Side("ddp", ddp, hosts=fast), Side("topk", ours, ("topk",), hosts=fast)]
        ten = measure("wire 10 Gbit/s", sides, steps=STEPS, rounds=ROUNDS)
    return [
        slowness("topk-1gbit-over-ddp", one["topk"], one["ddp"], "<= 0.40"),
        slowness("onebit-1gbit-over-ddp", one["onebit"], one["ddp"], "<= 0.40"),
        slowness("topk-1gbit-over-ddp-fp16", one["topk"], one["ddp-fp16"], "<= 0.65"),
        slowness("topk-10gbit-over-ddp", ten["topk"], ten["ddp"], "<= 1.1"),
        slowness("no-communication-1gbit-over-ddp", one["floor"], one["ddp"]),
    ]
