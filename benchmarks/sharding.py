"""Push and pull of VGG-16's 138 M weights, sharded over servers by size and by layer, each server behind 1 Gbit/s.

size-over-layer-2-servers    the speed of equal spans over that of whole layers, with two servers
size-over-layer-4-servers    the same with four
wire-share-1-shard           the time that the servers' links need for these bytes, over our time: one server
wire-share-2-shards          the same with two

Two workers push gradients to all shards, which apply their mean, and pull the weights: a step of bsp-server without
its computing. A link transfers all pushes, then all pulls: 2 workers x 2 x the bytes of the fullest server. Every
worker and server has a host of its own; only the servers' links are limited.
"""

from __future__ import annotations

import threading
from statistics import median
from typing import Any

import torch
from _hosts import Hosts
from _ranks import Commands, Side
from _side_by_side import measure, say, speed
from torch import nn

import manyhands as mh
from manyhands.codecs import Raw
from manyhands.consistency import Bulk
from manyhands.core.worker import Worker
from manyhands.report.progress import Progress
from manyhands.rules import Sgd
from manyhands.runtime.launch.join import connect as join
from manyhands.servers import ServerSetup, connect, serve
from manyhands.tasks import load

WORKERS = 2
ROUNDS = 7
MBIT = 1000


def vgg16() -> nn.Module:
    """The model with all parameters 0, which are never computed with. Zeros that were never written take no memory."""
    with torch.device("meta"):
        model = load("vgg16").model()
    for layer in [layer for layer in model if isinstance(layer, nn.Conv2d | nn.Linear)]:
        layer.weight, layer.bias = (nn.Parameter(torch.zeros(x.shape)) for x in (layer.weight, layer.bias))
    return model


def exchange(servers: str, how: Any, commands: Commands) -> None:
    """The loop of a worker or of a server."""
    transport = join(servers=int(servers))
    worker = Worker(transport, mh.Task(model=vgg16, data=[0]), vgg16(), seed=0, steps=0, batch_size=1)
    setup = ServerSetup(how, Bulk(), Sgd(0.01), Raw())
    if transport.role == "server":
        threading.Thread(target=commands.repeat, args=(lambda: None,), daemon=True).start()
        with torch.no_grad():
            serve(worker, setup)
        transport.leave()
        return
    clients = connect(worker, setup)
    gradients = [part.grad.fill_(1) for part in worker.flat.groups]

    def step() -> None:
        for client in clients:
            client.push_pull([(gradients[span.group][span.start : span.stop],) for span in client.spans], ())
        for client in clients:
            client.ask()
        for client in clients:
            client.pull([worker.flat.weights(span) for span in client.spans])

    with torch.no_grad():
        commands.repeat(step)
        for client in clients:
            client.done()
        if worker.rank == worker.lead:
            for client in clients:
                client.final([worker.flat.weights(span) for span in client.spans])
    transport.leave()


def run(progress: Progress) -> list[dict[str, Any]]:
    """By size and by layer. Rounds are printed to stderr, because `progress` counts samples."""
    results = []
    goals = {1: (None, ">= 0.9"), 2: (">= 1.4", ">= 0.8"), 4: (">= 2.5", None)}
    for servers, (faster, share) in goals.items():
        seconds = _measured(servers, ["size", "layer"] if faster else ["size"])
        if faster:
            results.append(speed(f"size-over-layer-{servers}-servers", seconds["size"], seconds["layer"], faster))
        if share:
            results.append(_share(servers, seconds["size"], share))
    return results


def _measured(servers: int, ways: list[str]) -> dict[str, list[float]]:
    with Hosts([None] * WORKERS + [MBIT] * servers) as hosts:
        ranks = WORKERS + servers
        sides = [Side(how, exchange, (str(servers), how), ranks, hosts) for how in ways]
        return measure(f"{servers} servers", sides, steps=1, rounds=ROUNDS)


def _share(servers: int, seconds: list[float], goal: str) -> dict[str, Any]:
    nbytes = 4 * sum(p.numel() for p in vgg16().parameters()) / servers
    needed = 2 * WORKERS * nbytes * 8 / (MBIT * 1e6)
    name = f"wire-share-{servers}-shard{'s' if servers > 1 else ''}"
    share = round(needed / median(seconds), 3)
    say(f"{name}: {share}, {median(seconds):.2f} s where the links need {needed:.2f} s")
    return {"name": name, "value": share, "goal": goal}
