"""Mixing: no server; in lock step each worker mixes its weights with those of all its neighbours.

split  data        when  every step, in lock step     who  the neighbours in a peer graph
what   any rounding Codec             how   any Rule, on the worker's own weights

    send x_i to all neighbours                        the transfer overlaps with the gradient
    g_i = gradient(x_i)
    x_i <- x_i + sum_j W_ij (x_j - x_i) + rule(g_i)   = sum_j W_ij x_j + rule(g_i)

Both terms are computed at the old x_i. With `mix="after"` the step is taken first, x_i' = x_i + rule(g_i), and its
results are mixed: x_i <- sum_j W_ij x_j'. W is symmetric and its rows sum to one (see peers/mixing.py), so the mean of
all x moves by the mean of the steps alone. The answer is that mean.

The term of a lost neighbour is left out, which adds its weight to the diagonal, so W remains symmetric with rows that
sum to one. If the graph loses its connection, each component trains on its own; the answer is still the mean of all.

With a codec C (and D, which decodes) C(x_i) is sent, and x_i moves by decoded values, its own included:
sum_j W_ij (D(C(x_j)) - D(C(x_i))). So the mean is kept, whatever is rounded.

x_i is sent from one of two buffers in turn. When a worker overwrites the buffer of its step before last, it has
received the models of the step in between from all neighbours, so they have read that buffer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from manyhands.core.codec import Codec
from manyhands.core.declared_state import StateParts
from manyhands.core.encoder import check_rounds
from manyhands.core.errors import PeerLost, refuse_unless
from manyhands.core.port import Tag, recv
from manyhands.core.rule import Rule, UpdateContext
from manyhands.core.strategy import Batch, Strategy, Traits, Weights
from manyhands.core.worker import Worker
from manyhands.peers import PeerModel, mixing, neighbours

MIX = Tag("mix", carries="vectors")


@dataclass
class Mixing(Strategy):
    """Synchronous decentralised training.

    Args:
        rule: how a worker applies its gradient.
        graph: which ranks are neighbours: ring, complete, exponential, torus or random.
        mix: whether x is mixed beside the step, at the same weights, or after it.
        codec: encodes x; None: it is sent uncompressed.
    """

    rule: Rule
    graph: str = "ring"
    mix: Literal["beside", "after"] = "beside"
    codec: Codec | None = None

    @property
    def traits(self) -> Traits:
        alone = "a worker's weights change only in its own step"
        return Traits(lockstep=True, on_worker_loss="continues", keeps_changes=True, lag="always 0", lag_counts=alone)

    def __post_init__(self) -> None:
        refuse_unless(self.mix in ("beside", "after"), "mix", repr(self.mix), "'beside' or 'after'")
        if self.codec is not None:
            check_rounds(self.codec)

    def check(self, workers: int, servers: int, batch_size: int, model: nn.Module) -> None:
        """The graph must exist."""
        neighbours(self.graph, 0, workers)

    def setup(self, w: Worker) -> None:
        """x, which are the model's weights; W_ij of each neighbour; two buffers to send x from."""
        me = w.workers.index(w.rank)
        self.x = [group.weights for group in w.flat.groups]
        self.own = PeerModel(w, self.rule, self.x, self.codec)
        row = mixing(self.graph, me, len(w.workers), w.seed)
        self.weights = {w.workers[i]: weight for i, weight in row.items() if i != me}
        self.buffers = [[w.slot(x) for x in self.x] for _ in range(2 if self.weights and not self.codec else 0)]
        self.mine: list[Tensor] = []

    def step(self, w: Worker, batch: Batch) -> float:
        """Send, compute, receive, move."""
        if self.mix == "beside":
            self._send(w)
        loss = w.gradient(batch)
        if self.mix == "after":
            self._update(w)
            self._send(w)
        moves = self._receive(w)
        if self.mix == "beside":
            self._update(w)
        for x, move in zip(self.x, moves, strict=False):
            w.ops.add(x, move)
        return loss

    def _send(self, w: Worker) -> None:
        """Send a copy of x to every neighbour; `mine` is what they decode."""
        if not self.weights:
            return
        if self.codec:
            payload = self.own.encode_model()
            self.mine = self.own.decode_model(payload)
        else:
            payload, self.mine = self.buffers[w.step % 2], self.x
            for copy, x in zip(payload, self.x, strict=True):
                w.ops.copy(x, copy)
        for rank in self.weights:
            w.transport.send(rank, MIX, (), payload)

    def _receive(self, w: Worker) -> list[Tensor]:
        """sum_j W_ij (x_j - x_i) in order of rank, without lost neighbours; empty if there are no neighbours."""
        moves = [w.ops.zeros_like(x) for x in self.x] if self.weights else []
        for rank, weight in self.weights.items():
            try:
                message = recv(w.transport, MIX, frm=rank)
            except PeerLost:
                continue
            for move, x, y in zip(moves, self.mine, self.own.decode_model(message.tensors), strict=True):
                w.ops.add(move, w.ops.difference(y, x), scale=weight)
            message.release()
        return moves

    def _update(self, w: Worker) -> None:
        """x <- x + rule(g)."""
        for group, weight_slice in zip(w.flat.groups, self.own.slices, strict=True):
            weight_slice.update(group.grad, UpdateContext(weight_slice.weights, samples=w.samples), group.untouched())

    def answer(self, w: Worker) -> Weights | None:
        """The mean of all workers' x."""
        return self.own.mean()

    def declared_state(self, w: Worker) -> StateParts:
        """Every worker's x, and the state of its rule."""
        return self.own.state_parts()
