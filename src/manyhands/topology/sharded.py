"""Sharded vectors, seen from outside: all keepers together (keeping.py is the loop of one).

A coordinator tells them what to do, by names and numbers only. A replica fetches weights and pushes gradients. Whoever
leads reads, saves and restores. What asks for nothing waits until something does, and goes with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from manyhands.core.flat import Span
from manyhands.core.protocols import Saved, Tag, on_one_host, recv
from manyhands.core.saving import Piece, join
from manyhands.core.worker import Worker
from manyhands.topology.keeping import (
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
from manyhands.topology.servers.sharding import by_size


def keepers(w: Worker) -> dict[int, list[Span]]:
    """Who keeps which stretch: the servers; without them the workers, or on one host the first of them alone.

    There a killed worker takes nothing with it but itself, and what a stretch costs is little next to a gradient.
    """
    ranks = w.servers or (w.workers[:1] if on_one_host(w.transport, w.workers) else w.workers)
    shards = by_size(w.flat, min(len(ranks), w.flat.numel))
    return dict(zip(ranks, shards, strict=False))


def total(parts: Sequence[float]) -> float:
    """The sum of all keepers' results, whatever their order; NaN if one is no number."""
    return math.fsum(parts) if all(map(math.isfinite, parts)) else math.nan


class Sharded:
    """One rank's way to all keepers; `spans` says what each of them keeps."""

    def __init__(self, w: Worker, spans: dict[int, list[Span]]) -> None:
        self._w = w
        self._t = w.transport
        self.spans = spans
        self._row: list[tuple[Any, ...]] = []

    # -- for the coordinator ----------------------------------------------------------------------

    def copy(self, x: str, into: str) -> None:
        """into <- x"""
        self._row.append(("copy", x, into))

    def scale(self, a: float, x: str) -> None:
        """x <- a x"""
        self._row.append(("scale", a, x))

    def add(self, a: float, x: str, to: str) -> None:
        """to <- to + a x"""
        self._row.append(("add", a, x, to))

    def drop(self, x: str) -> None:
        """Forget x."""
        self._row.append(("drop", x))

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
        """Have every keeper send a result."""
        self._row.append(question)
        self.tell()

    def open(self, number: int, t: float) -> None:
        """Begin a pass at w + t d."""
        self._row.append(("open", number, t))
        self.tell()

    def close(self, name: str, portions: int, samples: int) -> None:
        """End a pass when all portions are there: the mean gradient gets a name."""
        self._row.append(("close", name, portions, samples))

    def tell(self) -> None:
        """Send what there is to do."""
        row, self._row = tuple(self._row), []
        for rank in self.spans:
            self._t.send(rank, COMMAND, row)

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
            self._w.flat.weights(span).copy_(x)
        message.release()
        return message.meta

    def push(self, number: int, portion: int, gradients: Sequence[Tensor]) -> None:
        """Send a portion's gradient, one tensor per part of the model, to whom it concerns; it is lent."""
        for rank, spans in self.spans.items():
            cuts = [gradients[part][start:stop] for part, start, stop in spans]
            self._t.send(rank, PORTION, (number, portion), cuts)

    # -- for whoever reads, saves and restores ----------------------------------------------------

    def read(self, last: bool) -> list[Tensor]:
        """The weights, one tensor per part of the model. After the last time nobody keeps anything any more."""
        whole = [torch.empty_like(part.weights) for part in self._w.flat.parts]
        for rank in self.spans:
            self._t.send(rank, READ, (last,))
        for rank, spans in self.spans.items():
            message = recv(self._t, WHOLE, frm=rank)
            for (part, start, stop), x in zip(spans, message.tensors, strict=True):
                whole[part][start:stop] = x
            message.release()
        return whole

    def save(self, names: Sequence[str]) -> Saved:
        """Some vectors, by parameter."""
        found: list[Piece] = []
        for rank in self.spans:
            self._t.send(rank, SAVE_VECTORS, tuple(names))
        for rank in self.spans:
            message = recv(self._t, VECTORS, frm=rank)
            found += [Piece(name, start, x) for (name, start), x in zip(message.meta, message.keep(), strict=True)]
        return join(found)

    def restore(self, saved: Saved) -> None:
        """Give the keepers vectors back, whole; each takes its stretch."""
        for rank in self.spans:
            self._t.send(rank, RESTORE_VECTORS, tuple(saved), tuple(saved.values()))
        for rank in self.spans:
            recv(self._t, RESTORED, frm=rank)
