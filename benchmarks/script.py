"""A loop that is left as it is (`hands.prepare`), over the same bsp run with `hands.step`, and over DDP on gloo.

prepared-over-step    MLP of 10 M parameters, 2 workers through shared memory: the prepared loop over `hands.step`
prepared-over-ddp     the same loop over DDP's

Model, data, seeds, batch size and plain SGD are the same on all sides, and every process has one thread. The prepared
loop and DDP's are the same lines with the same optimizer of torch; `hands.step` updates by the strategy's own rule.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from _models import LEARNING_RATE, batches, model, plain_step, together
from _ranks import Commands, Side
from _side_by_side import measure, slowness
from bsp import ddp

import manyhands as mh
from manyhands.report.progress import Progress


def prepared(model_name: str, commands: Commands) -> None:
    """Our side: the loop of DDP, with `hands.prepare`."""
    os.environ["MANYHANDS_LINK"] = "shm"
    net = model(model_name)
    optimizer = torch.optim.SGD(net.parameters(), lr=LEARNING_RATE)
    with mh.join(strategy=mh.bsp()) as hands:
        hands.prepare(net, optimizer)
        commands.repeat(plain_step(net, batches(model_name), optimizer))


def by_steps(model_name: str, commands: Commands) -> None:
    """Our other form: the same run with `hands.step`."""
    together("shm", mh.bsp(lr=LEARNING_RATE), model_name, commands)


def run(progress: Progress) -> list[dict[str, Any]]:
    """The three sides in one run. Rounds are printed to stderr, because `progress` counts samples."""
    sides = [Side(name, side, ("mlp",)) for name, side in (("ddp", ddp), ("step", by_steps), ("prepared", prepared))]
    mlp = measure("script mlp", sides, steps=5)
    return [
        slowness("prepared-over-step", mlp["prepared"], mlp["step"], "<= 1.02"),
        slowness("prepared-over-ddp", mlp["prepared"], mlp["ddp"], "<= 0.95"),
    ]
