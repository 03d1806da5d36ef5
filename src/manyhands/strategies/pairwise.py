"""Pairwise: no server; each worker averages with one random neighbour after every gradient.

split  data        when  never in lock step     who  one neighbour in a peer graph
what   any rounding Codec          how   any Rule, on the worker's own weights

    main program                            communication activity
    x^ <- x                                 owns x; answers peers also while the main program computes
    g = gradient(x^)
    g ----------------------------------->  choose a neighbour j;  x_i, x_j <- (x_i + x_j) / 2
    <----------------------------- x        x <- x + rule(g)

An exchange is atomic (see peers/exchanges.py), so the mean of all x is kept and there is no deadlock. With `bipartite`
only the even ranks initiate exchanges and the odd ones only answer, as in the paper. The answer is the mean of all x.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from manyhands.core.barrier import barrier
from manyhands.core.codec import Codec
from manyhands.core.declared_state import StateParts
from manyhands.core.encoder import check_rounds
from manyhands.core.errors import refuse_unless
from manyhands.core.gather import gather
from manyhands.core.rule import Rule
from manyhands.core.strategy import Batch, Strategy, Traits, Weights
from manyhands.core.worker import Worker
from manyhands.peers import PairwiseAverage, PeerLoop, PeerModel, neighbours, sides


@dataclass
class Pairwise(Strategy):
    """Asynchronous decentralised training on a peer graph.

    Args:
        rule: how a worker applies its gradient.
        graph: which ranks are neighbours: ring, complete, exponential, torus or random.
        bipartite: whether only one side of the graph initiates exchanges.
        codec: encodes x; None: it is sent uncompressed.
    """

    rule: Rule
    graph: str = "ring"
    bipartite: bool = False
    codec: Codec | None = None

    @property
    def traits(self) -> Traits:
        return Traits(
            lockstep=False,
            on_worker_loss="continues",
            bounded=False,
            lag="counted",
            lag_counts="averages that peers have begun with this worker since x^ was read",
        )

    def __post_init__(self) -> None:
        if self.codec is not None:
            check_rounds(self.codec)

    def check(self, workers: int, servers: int, batch_size: int, model: nn.Module) -> None:
        """The graph must exist, and be bipartite if that is required."""
        neighbours(self.graph, 0, workers)
        if self.bipartite:
            refuse_unless(self.graph != "random", "graph", self.graph, "one that always has two sides")
            sides(self.graph, workers)

    def setup(self, w: Worker) -> None:
        """x, and the activity that owns it; the model's own weights are x^; the neighbours."""
        me, workers = w.workers.index(w.rank), len(w.workers)
        self.peers = [w.workers[i] for i in neighbours(self.graph, me, workers, w.seed)]
        self.initiates = not self.bipartite or me in sides(self.graph, workers)[0]
        self.own = PeerModel(w, self.rule, codec=self.codec)
        self.loop = PeerLoop(self.own, PairwiseAverage(self.own), "after", lambda: self._chosen(w))

    def step(self, w: Worker, batch: Batch) -> float:
        """Compute at x^ while peers may change x; average x with a peer's and update it; read x."""
        loss = w.gradient(batch)
        self.loop.take_step()
        return loss

    def _chosen(self, w: Worker) -> Iterator[int]:
        """The neighbours in random order; none if this worker does not initiate exchanges."""
        peers = [rank for rank in self.peers if rank not in self.loop.lost] if self.initiates else []
        return reversed(w.random.sample(peers, len(peers)))

    def finish(self, w: Worker) -> None:
        """Wait until all workers have taken their last step: until then they may start exchanges with this one."""
        gather(w)

    def answer(self, w: Worker) -> Weights | None:
        """The mean of all workers' x."""
        return self.own.mean()

    # -- checkpoints ------------------------------------------------------------------------------

    def quiesce(self, w: Worker) -> None:
        """As at the end of the run: without steps there are no exchanges."""
        self.finish(w)

    def resume(self, w: Worker) -> None:
        """Compute on the current x."""
        self.own.show()

    def declared_state(self, w: Worker) -> StateParts:
        """Every worker's x, and the state of its rule."""
        return self.own.state_parts()

    def restored(self, w: Worker) -> None:
        """Compute on x; no worker may average before all have loaded theirs."""
        self.own.show()
        barrier(w)
