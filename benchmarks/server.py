"""Push, update and pull of 100 MB with one worker and one server, against plain TCP sockets.

shm-zero-copy-over-tcp      the worker reads the weights in place, without a copy: the peer's time over ours
shm-copied-pull-over-tcp    the worker copies them, as asynchronous methods must
tcp-over-sockets            our own TCP link, which also frames, checks and queues

The peer is a minimal program: `sendall` from and `recv_into` to memory allocated and touched once.
"""

from __future__ import annotations

import os
import socket
import time
from statistics import median
from typing import Any

import torch
from _ranks import Commands, Side
from _side_by_side import measure, say, speed
from torch import Tensor, nn

import manyhands as mh
from manyhands.codecs import Raw
from manyhands.consistency import Free
from manyhands.core.port import Tag, recv
from manyhands.core.worker import Worker
from manyhands.report.progress import Progress
from manyhands.rules import Sgd
from manyhands.runtime.launch import join
from manyhands.servers import ServerSetup, connect

NUMBERS = 25_000_000
"""float32: 100 MB."""
BUFFER = 1 << 20
"""Bytes of the peer's socket buffers. With MSG_WAITALL it took 0.92 of the time that the kernel's own choice takes;
256 KiB 0.96, 2 MiB 1.03, 4 MiB 1.04."""
LEARNING_RATE = 0.01
PUSH, WEIGHTS = Tag("bench-push", carries="floats"), Tag("bench-weights", carries="floats")
SERVER = 1
"""The rank with the weights."""


def zero_copy(commands: Commands) -> None:
    """Through shared memory; the pull is a view of the weights."""
    through_the_port("shm", commands)


def tcp(commands: Commands) -> None:
    """Through our TCP link."""
    through_the_port("tcp", commands)


def through_the_port(link: str, commands: Commands) -> None:
    """The two loops of the peer, written against `Transport`."""
    os.environ["MANYHANDS_LINK"] = link
    transport = join.connect()
    gradient, weights = (transport.slot(NUMBERS, torch.float32).fill_(1) for _ in range(2))

    def exchange() -> None:
        transport.send(SERVER, PUSH, tensors=[gradient])
        recv(transport, WEIGHTS, frm=SERVER).release()

    def serve() -> None:
        pushed = recv(transport, PUSH)
        weights.add_(pushed.tensors[0], alpha=-LEARNING_RATE)
        pushed.release()
        transport.send(pushed.frm, WEIGHTS, tensors=[weights])

    commands.repeat(serve if here() == SERVER else exchange)
    transport.leave()


def copied_pull(commands: Commands) -> None:
    """Through shared memory, as ssp does it: the worker applies its gradient and copies the weights, under locks."""
    os.environ["MANYHANDS_LINK"] = "shm"
    transport = join.connect()
    task = mh.Task(model=Vector, data=[0])
    worker = Worker(transport, task, Vector(), seed=0, steps=0, batch_size=1)
    clients = connect(worker, ServerSetup("size", Free(), Sgd(LEARNING_RATE), Raw()))
    gradient = torch.ones(NUMBERS)

    views = [[worker.flat.weights(span) for span in client.spans] for client in clients]

    def exchange() -> None:
        read = []
        for client, into in zip(clients, views, strict=True):
            payload = [(gradient[span.start : span.stop],) for span in client.spans]
            read.append(client.push_pull(payload, (), into).read)
        for client, into, unchanged in zip(clients, views, read, strict=True):
            client.ask()
            client.pull(into, unchanged)

    commands.repeat(exchange if here() != SERVER else lambda: None)
    transport.leave()


class Vector(nn.Module):
    """A model with one parameter vector."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.ones(NUMBERS))


def sockets(commands: Commands) -> None:
    """The peer: plain TCP sockets."""
    gradient, weights = torch.ones(NUMBERS), torch.ones(NUMBERS)
    pushed, pulled = bytes_of(gradient), bytes_of(weights)
    with connected() as link:

        def exchange() -> None:
            link.sendall(pushed)
            fill(pulled, link)

        def serve() -> None:
            fill(pushed, link)
            weights.add_(gradient, alpha=-LEARNING_RATE)
            link.sendall(pulled)

        commands.repeat(serve if here() == SERVER else exchange)


def here() -> int:
    """The rank of this process."""
    return int(os.environ["RANK"])


def connected() -> socket.socket:
    """The one connection between worker and server."""
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if here() != SERVER:
        return _connect(address)
    with _socket() as listener:
        listener.bind(address)
        listener.listen()
        return listener.accept()[0]


def _connect(address: tuple[str, int]) -> socket.socket:
    """Connect, and retry while the server is starting; the coordinator ends a rank that waits too long."""
    while True:
        link = _socket()
        try:
            link.connect(address)
            return link
        except ConnectionRefusedError:
            link.close()
            time.sleep(0.05)


def _socket() -> socket.socket:
    """A socket with the fastest buffer sizes, which connections inherit from their listener."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
    return made


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a tensor."""
    return tensor.numpy().data.cast("B")


def fill(memory: memoryview, link: socket.socket) -> None:
    """Receive exactly as many bytes as `memory` has."""
    while memory:
        received = link.recv_into(memory, 0, socket.MSG_WAITALL)
        if received == 0:
            raise ConnectionError("the peer has closed the connection")
        memory = memory[received:]


def run(progress: Progress) -> list[dict[str, Any]]:
    """All three ways. Rounds are printed to stderr, because `progress` counts samples."""
    seconds = measure("server", [Side(side.__name__, side) for side in (sockets, zero_copy, copied_pull, tcp)], steps=3)
    peer = seconds["sockets"]
    say(f"the peer moves {2 * 4 * NUMBERS / median(peer) / 1e9:.2f} GB/s, its update included")
    return [
        speed("shm-zero-copy-over-tcp", seconds["zero_copy"], peer, ">= 5"),
        speed("shm-copied-pull-over-tcp", seconds["copied_pull"], peer, ">= 4"),
        speed("tcp-over-sockets", seconds["tcp"], peer, ">= 0.85"),
    ]
