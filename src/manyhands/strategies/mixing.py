"""Mixing: no server; in lock step each worker mixes its weights with those of all its neighbours.

split  data        when  every step, in lock step     who  the neighbours in a peer graph
what   any Codec that Rounds          how   any Rule, on the worker's own weights

    tell all neighbours x_i                           it travels while the gradient is computed
    g_i = gradient(x_i)
    x_i <- x_i + sum_j W_ij (x_j - x_i) + rule(g_i)   = sum_j W_ij x_j + rule(g_i)

Neither move has seen the other. With `mix="after"` the step comes first, x_i' = x_i + rule(g_i), and then all mix what
it has made of them: x_i <- sum_j W_ij x_j'. W is symmetric and its rows sum to one (see topology/peers/mixing.py), so
the mean of all x moves by the mean of the steps alone. The answer is that mean.

A lost neighbour makes no difference: its term is left out, which gives its weight to the diagonal, so W stays what it
was among the others. If they fall apart into pieces that no longer hear of each other, each trains on; the answer is
still the mean of all.

With a codec C (and D, which decodes) neighbours are told C(x_i), and x_i moves by what all make of it, its own too:
sum_j W_ij (D(C(x_j)) - D(C(x_i))). So the mean stays what it was, whatever is rounded.

What is told lies in one of two rows of memory in turn. When a worker writes into the row of its step before last, each
neighbour has told it of the step in between, and so has read that one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from manyhands.core.errors import PeerLost, refuse_unless
from manyhands.core.protocols import At, Batch, Codec, Rule, Saved, Tag, Weights, recv
from manyhands.core.sending import check_rounds
from manyhands.core.worker import Worker
from manyhands.topology.peers import Own, mixing, neighbours

MIX = Tag("mix", carries="vectors")


@dataclass
class Mixing:
    """Synchronous decentralised training.

    Args:
        rule: how a worker applies its gradient.
        graph: who is whose neighbour: ring, complete, exponential, torus or random.
        mix: beside the step, which has not seen it, or after it.
        codec: what x looks like on the wire; as it is, if not given.
    """

    rule: Rule
    graph: str = "ring"
    mix: Literal["beside", "after"] = "beside"
    codec: Codec | None = None
    lockstep: ClassVar[bool] = True
    one_host: ClassVar[bool] = False

    def __post_init__(self) -> None:
        refuse_unless(self.mix in ("beside", "after"), "mix", repr(self.mix), "'beside' or 'after'")
        if self.codec is not None:
            check_rounds(self.codec)

    def check(self, workers: int, servers: int, batch_size: int, model: nn.Module) -> None:
        """The graph must exist."""
        neighbours(self.graph, 0, workers)

    def setup(self, w: Worker) -> None:
        """x, which the model computes on; W_ij of each neighbour; two rows of memory to tell x from."""
        me = w.workers.index(w.rank)
        self.x = [part.weights for part in w.flat.parts]
        self.own = Own(w, self.rule, self.x, self.codec)
        row = mixing(self.graph, me, len(w.workers), w.seed)
        self.weights = {w.workers[place]: weight for place, weight in row.items() if place != me}
        self.rows = [[_memory(w, x) for x in self.x] for _ in range(2 if self.weights and not self.codec else 0)]
        self.mine: list[Tensor] = []

    def step(self, w: Worker, batch: Batch) -> float:
        """Compute, tell and hear, move."""
        if self.mix == "beside":
            self.tell(w)
        loss = w.gradient(batch)
        if self.mix == "after":
            self.update(w)
            self.tell(w)
        moves = self.hear(w)
        if self.mix == "beside":
            self.update(w)
        for number, move in enumerate(moves):
            self.x[number].add_(move)
        return loss

    def tell(self, w: Worker) -> None:
        """Lend a copy of x to every neighbour; what they make of it is what we take for our own."""
        if not self.weights:
            return
        row = self.own.told() if self.codec else self.rows[w.step % 2]
        for copy, x in zip(row, self.x, strict=True) if not self.codec else ():
            copy.copy_(x)
        self.mine = self.own.heard(row) if self.codec else self.x
        for rank in self.weights:
            w.transport.send(rank, MIX, (), row)

    def hear(self, w: Worker) -> list[Tensor]:
        """sum_j W_ij (x_j - x_i), in order of rank; whoever is lost has no say. Nothing without neighbours."""
        moves = [torch.zeros_like(x) for x in self.x] if self.weights else []
        for rank, weight in self.weights.items():
            try:
                message = recv(w.transport, MIX, frm=rank)
            except PeerLost:
                continue
            for move, x, y in zip(moves, self.mine, self.own.heard(message.tensors), strict=True):
                move.add_(y - x, alpha=weight)
            message.release()
            w.move(3 * sum(x.nbytes for x in self.x))
        return moves

    def update(self, w: Worker) -> None:
        """x <- x + rule(g)."""
        for part, held in zip(w.flat.parts, self.own.held, strict=True):
            held.update(part.grad, At(held.weights, samples=w.samples), part.untouched())

    def answer(self, w: Worker) -> Weights | None:
        """The mean of everyone's x."""
        return self.own.mean()

    # -- checkpoints ------------------------------------------------------------------------------

    def state(self, w: Worker) -> Saved | None:
        """Every worker's x, and what its rule remembers."""
        return self.own.state()

    def restore(self, w: Worker, saved: Saved) -> None:
        """Each its own; what neighbours tell meanwhile waits for the first step."""
        self.own.restore(saved)


def _memory(w: Worker, x: Tensor) -> Tensor:
    """To lend from: peers of this host read it in place."""
    return x if x.is_meta else w.transport.slot(x.numel(), x.dtype)
