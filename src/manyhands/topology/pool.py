"""Pool: the workers of one host have one memory for the weights, and each of them moves its own stretch of it.

    each rank:  meet · w[span r] <- w[span r] + rule(mean of all gradients on span r) · meet

Gradients arrive in memory that all can read, so nothing is sent or copied, and each update is made once, not P times.
How they meet is in gate.py. The first meeting says that all gradients are there, the second that all weights have moved
(and that nobody reads gradients any more). It is for methods in lock step only: others would compute on weights that
move under their hands.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from manyhands.core.gather import gather
from manyhands.core.holding import Holding
from manyhands.core.protocols import At, Rule, Saved
from manyhands.core.saving import Piece, join, pieces
from manyhands.core.worker import Worker
from manyhands.topology.collectives.gate import gate
from manyhands.topology.common import common_weights
from manyhands.topology.servers.sharding import cut


class Pool:
    """One worker's part of it. The model's weights and gradients move into the common memory."""

    def __init__(self, w: Worker, rule: Rule) -> None:
        self._w = w
        self._meet = gate(w.transport, w.workers, "pool")
        place = w.workers.index(w.rank)
        w.flat.move_to(common_weights(w, "pool.weights"))
        self._gradients = [self._memory(rank) for rank in w.workers]
        w.flat.collect_in(self._gradients[place])
        shards = cut(w.flat, "size", len(w.workers), rule, at_most=True)
        mine = shards[place] if place < len(shards) else []
        self.held = [Holding(span, w.flat.weights(span), w.flat.places, rule) for span in mine]

    def _memory(self, rank: int) -> list[Tensor]:
        """Where the gradient of a worker lies."""
        shared, parts = self._w.transport.shared, self._w.flat.parts
        return [shared(f"pool.gradient{rank}.{n}", p.outgoing.numel(), p.outgoing.dtype) for n, p in enumerate(parts)]

    def step(self) -> None:
        """All gradients are in their places, or will be: move the weights by their mean."""
        w, workers = self._w, len(self._gradients)
        self._meet()
        untouched = self._untouched()
        for held in self.held:
            part, start, stop = held.span
            w.move((workers + 2) * held.weights.nbytes)
            gradients = [memory[part][start:stop] for memory in self._gradients]
            held.merge(gradients, At(held.weights, samples=w.samples, count=workers), untouched)
        self._meet()

    def _untouched(self) -> Sequence[int]:
        """The parameters that nobody touched: the marks lie behind the gradients."""
        found: list[int] = []
        for number, part in enumerate(self._w.flat.parts):
            marks = [memory[number][part.weights.numel() :] for memory in self._gradients]
            if not any(bool(one.all()) for one in marks):
                first, total = part.places[0].mark, torch.stack(marks).sum(0)
                found += [first + n for n in torch.nonzero(total == 0).flatten().tolist()]
        return found

    def state(self) -> Saved | None:
        """What the rules of all stretches remember, on the lead."""
        mine = list(pieces(self.held, self._w.flat.places))
        gathered = gather(self._w, tuple(piece[:2] for piece in mine), [piece.values for piece in mine])
        if gathered is None:
            return None
        return join(
            Piece(name, start, values)
            for meta, tensors in gathered.values()
            for (name, start), values in zip(meta, tensors, strict=True)
        )
