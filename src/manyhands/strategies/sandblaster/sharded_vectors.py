"""ShardedVectors: the client of all vector servers (vector_server.py is the loop of one).

The coordinator sends them operations, of names and numbers only. A replica fetches weights and pushes gradients. The
lead reads, saves and restores. Operations without a result are queued, and sent with the next one that has a result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from manyhands.core.flat import Span
from manyhands.core.port import Tag, on_one_host, recv
from manyhands.core.sharding import by_size
from manyhands.core.state import StateSlice, join
from manyhands.core.strategy import Saved
from manyhands.core.vector_ops import UNCHARGED
from manyhands.core.worker import Worker
from manyhands.strategies.sandblaster.vector_server import (
    COMMAND,
    FETCH,
    FETCHED,
    PORTION,
    READ,
    RESTORE_VECTORS,
    RESTORED,
    RESULT,
    SAVE_VECTORS,
    VECTORS,
    WHOLE,
)


def vector_spans(w: Worker) -> dict[int, list[Span]]:
    """The spans of every vector server: the server ranks, or else the workers, or on one host the first worker alone.

    On one host the loss of another worker then loses no shard, and the work on a shard is small next to a gradient.
    """
    ranks = w.servers or (w.workers[:1] if on_one_host(w.transport, w.workers) else w.workers)
    shards = by_size(w.flat, min(len(ranks), w.flat.numel))
    return dict(zip(ranks, shards, strict=False))


def total(results: Sequence[float]) -> float:
    """The sum of the results of all servers, independent of their order; NaN if one is not finite."""
    return math.fsum(results) if all(map(math.isfinite, results)) else math.nan


class ShardedVectors:
    """One rank's client of all vector servers; `spans` says what each of them holds."""

    def __init__(self, w: Worker, spans: dict[int, list[Span]]) -> None:
        self._w = w
        self._t = w.transport
        self.spans = spans
        self._queue: list[tuple[Any, ...]] = []

    # -- for the coordinator ----------------------------------------------------------------------

    def copy(self, x: str, into: str) -> None:
        """into <- x"""
        self._queue.append(("copy", x, into))

    def scale(self, a: float, x: str) -> None:
        """x <- a x"""
        self._queue.append(("scale", a, x))

    def add(self, a: float, x: str, to: str) -> None:
        """to <- to + a x"""
        self._queue.append(("add", a, x, to))

    def drop(self, x: str) -> None:
        """Delete x on all servers."""
        self._queue.append(("drop", x))

    def dot(self, x: str, y: str) -> float:
        """xᵀy"""
        return total(self._results("dot", x, y))

    def size(self, x: str) -> float:
        """The sum of |x_i|."""
        return total(self._results("size", x))

    def reach(self, x: str) -> float:
        """The largest |x_i|."""
        return max(self._results("reach", x))

    def _results(self, *question: str) -> list[float]:
        self.ask(*question)
        return [float(recv(self._t, RESULT, frm=rank).meta[0]) for rank in self.spans]

    def ask(self, *question: str) -> None:
        """Make every server send a result."""
        self._queue.append(question)
        self.send()

    def open(self, number: int, t: float) -> None:
        """Begin a pass at w + t d."""
        self._queue.append(("open", number, t))
        self.send()

    def close(self, name: str, portions: int, samples: int) -> None:
        """End a pass when all portions have arrived: the mean gradient gets a name."""
        self._queue.append(("close", name, portions, samples))

    def send(self) -> None:
        """Send the queued operations."""
        operations, self._queue = tuple(self._queue), []
        for rank in self.spans:
            self._t.send(rank, COMMAND, operations)

    # -- for replicas -----------------------------------------------------------------------------

    def fetch(self, number: int) -> bool:
        """Load the weights of a pass into the model; False if it is over."""
        for rank in self.spans:
            self._t.send(rank, FETCH, (number,))
        found = [self._load(rank, FETCHED) for rank in self.spans]
        return all(meta == (number,) for meta in found)

    def _load(self, rank: int, tag: Tag) -> tuple[Any, ...]:
        message = recv(self._t, tag, frm=rank)
        for span, x in zip(self.spans[rank], message.tensors, strict=True):
            UNCHARGED.copy(x, self._w.flat.weights(span))  # receiving the message has been charged
        message.release()
        return message.meta

    def push(self, number: int, portion: int, gradients: Sequence[Tensor]) -> None:
        """Send a portion's gradient, one tensor per dtype group, to the servers; it is lent."""
        for rank, spans in self.spans.items():
            cuts = [gradients[group][start:stop] for group, start, stop in spans]
            self._t.send(rank, PORTION, (number, portion), cuts)

    # -- for the lead -----------------------------------------------------------------------------

    def read(self, last: bool) -> list[Tensor]:
        """The weights, one tensor per dtype group; `last` ends the servers."""
        whole = [torch.empty_like(group.weights) for group in self._w.flat.groups]
        for rank in self.spans:
            self._t.send(rank, READ, (last,))
        for rank, spans in self.spans.items():
            message = recv(self._t, WHOLE, frm=rank)
            for (group, start, stop), x in zip(spans, message.tensors, strict=True):
                whole[group][start:stop] = x
            message.release()
        return whole

    def save(self, names: Sequence[str]) -> Saved:
        """The values of some vectors, by parameter."""
        found: list[StateSlice] = []
        for rank in self.spans:
            self._t.send(rank, SAVE_VECTORS, tuple(names))
        for rank in self.spans:
            message = recv(self._t, VECTORS, frm=rank)
            found += [StateSlice(name, start, x) for (name, start), x in zip(message.meta, message.keep(), strict=True)]
        return join(found)

    def restore(self, saved: Saved) -> None:
        """Send saved vectors to all servers; each loads its shard."""
        for rank in self.spans:
            self._t.send(rank, RESTORE_VECTORS, tuple(saved), tuple(saved.values()))
        for rank in self.spans:
            recv(self._t, RESTORED, frm=rank)
