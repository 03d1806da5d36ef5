"""Pairwise: no server; each worker averages with one random neighbour after every gradient.

split  data        when  never in lock step     who  one neighbour of a peer graph
what   any Codec that Rounds       how   any Rule, on the worker's own weights

    main program                            communication
    x^ <- x                                 owns x; answers peers also while the main program computes
    g = gradient(x^)
    hand over g  ------------------------>  choose a neighbour j;  x_i, x_j <- (x_i + x_j) / 2
    <----------------------------- x        x <- x + rule(g)

An exchange is atomic (see topology/peers/exchanges.py), so the mean of all x is kept and nobody waits in a circle. With
`bipartite` the even ranks only initiate and the odd ones only answer, as in the paper. The answer is the mean of all x.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from manyhands.core.errors import PeerLost, refuse_unless
from manyhands.core.gather import gather
from manyhands.core.meeting import meet
from manyhands.core.protocols import Batch, Codec, Message, Rule, Saved, Weights, recv
from manyhands.core.sending import check_rounds
from manyhands.core.worker import Worker
from manyhands.topology.peers import GRADIENT, Own, Pairing, neighbours, sides


@dataclass
class Pairwise:
    """Asynchronous decentralised training.

    Args:
        rule: how a worker applies its gradient.
        graph: who is whose neighbour: ring, complete, exponential, torus or random.
        bipartite: only one side of the graph initiates.
        codec: what x looks like on the wire; as it is, if not given.
    """

    rule: Rule
    graph: str = "ring"
    bipartite: bool = False
    codec: Codec | None = None
    lockstep: ClassVar[bool] = False
    one_host: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.codec is not None:
            check_rounds(self.codec)

    def check(self, workers: int, servers: int, batch_size: int, model: nn.Module) -> None:
        """The graph must exist, and have two sides if that is asked for."""
        neighbours(self.graph, 0, workers)
        if self.bipartite:
            refuse_unless(self.graph != "random", "graph", self.graph, "one that always has two sides")
            sides(self.graph, workers)

    def setup(self, w: Worker) -> None:
        """x, what is averaged; the model's own weights are x^, what is computed on."""
        me, workers = w.workers.index(w.rank), len(w.workers)
        self.own = Own(w, self.rule, codec=self.codec)
        self.pairing = Pairing(self.own)
        self.peers = [w.workers[i] for i in neighbours(self.graph, me, workers, w.seed)]
        self.initiates = not self.bipartite or me in sides(self.graph, workers)[0]
        self.gradient: Message | None = None
        w.transport.spawn(lambda: self.communicate(w), daemon=True)

    def step(self, w: Worker, batch: Batch) -> float:
        """Compute at x^ while peers may move x; hand over the gradient; read x again."""
        loss = w.gradient(batch)
        self.own.take_step()
        return loss

    # -- the communication activity, sole owner of x ----------------------------------------------

    def communicate(self, w: Worker) -> None:
        """Answer peers, and carry out our own exchanges, one message at a time."""
        while True:
            try:
                message = recv(w.transport, GRADIENT, *self.pairing.tags)
            except PeerLost as loss:
                over = self.forget(loss.rank)
            else:
                over = self.begin(w, message) if message.tag == GRADIENT else self.pairing.hear(message)
            if over:
                self.complete()

    def begin(self, w: Worker, gradient: Message) -> bool:
        """Keep the gradient until we have averaged with a neighbour, chosen at random."""
        self.gradient = gradient
        return self.pairing.begin(reversed(w.random.sample(self.peers, len(self.peers)) if self.initiates else []))

    def complete(self) -> None:
        """The exchange is over: step by the gradient, let the main program go on."""
        assert self.gradient is not None
        self.own.update(self.gradient)
        self.gradient = None
        self.own.give_back()

    def forget(self, rank: int) -> bool:
        """A peer is lost: it is not chosen any more."""
        self.peers = [peer for peer in self.peers if peer != rank]
        return self.pairing.forget(rank)

    # -- the end ----------------------------------------------------------------------------------

    def finish(self, w: Worker) -> None:
        """Peers may still want to average with us: wait until all have taken their last step."""
        gather(w)

    def answer(self, w: Worker) -> Weights | None:
        """The mean of everyone's x."""
        return self.own.mean()

    # -- checkpoints ------------------------------------------------------------------------------

    def rest(self, w: Worker) -> None:
        """As at the end: nobody averages any more once all have taken their step."""
        self.finish(w)

    def go_on(self, w: Worker) -> None:
        """Compute on x as it is now."""
        self.own.show()

    def state(self, w: Worker) -> Saved | None:
        """Every worker's x, and what its rule remembers."""
        return self.own.state()

    def restore(self, w: Worker, saved: Saved) -> None:
        """Each its own, before anybody averages."""
        self.own.restore(saved)
        meet(w)
