"""Pairwise: no server; each worker averages with one random neighbour after every gradient.

split  data        when  never in lock step     who  one neighbour of a peer graph
what   raw         how   any Rule, on the worker's own weights

    main program                            communication
    x^ <- x                                 owns x; answers peers also while the main program computes
    g = gradient(x^)
    hand over g  ------------------------>  choose a neighbour j;  x_i, x_j <- (x_i + x_j) / 2
    <----------------------------- x        x <- x + rule(g)

An exchange is atomic: while its own is open, a rank refuses others, who then try another neighbour; when
two open exchanges with each other cross, each takes the other's offer as the answer. So the mean of all
x is kept and nobody waits in a circle. With `bipartite` the even ranks only initiate and the odd ones
only answer, as in the paper. The answer is the mean of all x.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from manyhands.core.errors import PeerLost
from manyhands.core.gather import gather, mean
from manyhands.core.holding import replica
from manyhands.core.meeting import meet
from manyhands.core.protocols import At, Batch, Message, Rule, Saved, Tag, Weights, recv
from manyhands.core.saving import collect, join, named, own, pieces, place, restore, section, under
from manyhands.core.worker import Worker
from manyhands.topology.peers import neighbours, sides

GRADIENT, MOVED = Tag("gradient"), Tag("moved-on")
OFFER, TAKEN, REFUSED = Tag("offer", credit=8), Tag("taken", credit=8), Tag("refused", credit=8)


@dataclass
class Pairwise:
    """Asynchronous decentralised training.

    Args:
        rule: how a worker applies its gradient.
        graph: who is whose neighbour: ring, complete, exponential or torus.
        bipartite: only one side of the graph initiates.
    """

    rule: Rule
    graph: str = "ring"
    bipartite: bool = False
    lockstep: ClassVar[bool] = False
    one_host: ClassVar[bool] = False

    def check(self, workers: int, servers: int, batch_size: int, model: nn.Module) -> None:
        """The graph must exist, and have two sides if that is asked for."""
        neighbours(self.graph, 0, workers)
        if self.bipartite:
            sides(self.graph, workers)

    def setup(self, w: Worker) -> None:
        """x, what is averaged; the model's own weights are x^, what is computed on."""
        me = w.workers.index(w.rank)
        self.x = [part.weights.clone() for part in w.flat.parts]
        self.held = replica(w.flat, self.rule, self.x)
        self.peers = [w.workers[i] for i in neighbours(self.graph, me, len(w.workers))]
        self.initiates = not self.bipartite or me in sides(self.graph, len(w.workers))[0]
        self.open: int | None = None
        self.untried: list[int] = []
        self.gradient: Message | None = None
        w.transport.spawn(lambda: self.communicate(w), daemon=True)

    def step(self, w: Worker, batch: Batch) -> float:
        """Compute at x^ while peers may move x; hand over the gradient; read x again."""
        loss = w.gradient(batch)
        grads = [part.grad for part in w.flat.parts]
        w.transport.send(w.rank, GRADIENT, tuple(sorted(w.flat.untouched())), grads)
        message = recv(w.transport, MOVED, frm=w.rank)
        with torch.no_grad():
            for part, x in zip(w.flat.parts, message.tensors, strict=True):
                part.weights.copy_(x)
        message.release()
        return loss

    # -- the communication activity, sole owner of x ----------------------------------------------

    def communicate(self, w: Worker) -> None:
        """Answer peers, and carry out our own exchanges, one message at a time."""
        while True:
            try:
                message = recv(w.transport, GRADIENT, OFFER, TAKEN, REFUSED)
            except PeerLost as loss:
                self.forget(w, loss.rank)
                continue
            if message.tag == GRADIENT:
                self.gradient = message
                self.untried = w.random.sample(self.peers, len(self.peers)) if self.initiates else []
                self.try_next(w)
            elif message.tag == OFFER:
                self.consider(w, message)
            elif message.tag == TAKEN:
                self.average(w, message)
                self.complete(w)
            else:
                self.try_next(w)

    def try_next(self, w: Worker) -> None:
        """Offer x to the next neighbour; if all refuse, go on without averaging."""
        self.open = self.untried.pop() if self.untried else None
        if self.open is None:
            self.complete(w)
        else:
            w.transport.send(self.open, OFFER, (), self.copies())

    def consider(self, w: Worker, offer: Message) -> None:
        """A peer offers its weights: average with it, unless an exchange of our own is open."""
        if self.open is None:
            w.transport.send(offer.frm, TAKEN, (), self.copies())
            self.average(w, offer)
        elif self.open == offer.frm:
            self.average(w, offer)
            self.complete(w)
        else:
            offer.release()
            w.transport.send(offer.frm, REFUSED)

    def copies(self) -> list[Tensor]:
        """x, to lend: we go on changing our own."""
        return [x if x.is_meta else x.clone() for x in self.x]

    @torch.no_grad()
    def average(self, w: Worker, message: Message) -> None:
        """x <- (x + y) / 2."""
        self.place([(x + y) / 2 for x, y in zip(self.x, message.tensors, strict=True)])
        message.release()
        w.move(2 * sum(x.nbytes for x in self.x))

    def place(self, values: list[Tensor]) -> None:
        """Give x these values; it stays in its memory, since a rule may hold on to that."""
        for x, value in zip(self.x, values, strict=True):
            x.copy_(value)

    def complete(self, w: Worker) -> None:
        """The exchange is over: step by the gradient, let the main program go on."""
        self.open = None
        assert self.gradient is not None
        message, self.gradient = self.gradient, None
        for held, g in zip(self.held, message.tensors, strict=True):
            held.update(g if g.is_meta else g.clone(), At(held.weights, samples=w.samples), message.meta)
        message.release()
        w.transport.send(w.rank, MOVED, (), self.copies())

    def forget(self, w: Worker, rank: int) -> None:
        """A peer is lost: it will not answer."""
        self.peers = [peer for peer in self.peers if peer != rank]
        self.untried = [peer for peer in self.untried if peer != rank]
        if self.open == rank:
            self.try_next(w)

    # -- the end ----------------------------------------------------------------------------------

    def finish(self, w: Worker) -> None:
        """Peers may still want to average with us: wait until all have taken their last step."""
        gather(w)

    def answer(self, w: Worker) -> Weights | None:
        """The mean of everyone's x."""
        gathered = gather(w, (), self.x)
        return None if gathered is None else w.named(mean(gathered))

    # -- checkpoints ------------------------------------------------------------------------------

    def rest(self, w: Worker) -> None:
        """As at the end: nobody averages any more once all have taken their step."""
        self.finish(w)

    def go_on(self, w: Worker) -> None:
        """Compute on x as it is now, not as it was after the last own step."""
        place(w.flat.places, [part.weights for part in w.flat.parts], named(w.flat.places, self.x))

    def state(self, w: Worker) -> Saved | None:
        """Every worker's x, and what its rule remembers."""
        rule = join(pieces(self.held, w.flat.places))
        return collect(w, under("x", named(w.flat.places, self.x)) | under("rule", rule))

    def restore(self, w: Worker, saved: Saved) -> None:
        """Each its own, before anybody averages; a new worker begins at the mean with a fresh rule."""
        if mine := own(w, saved):
            place(w.flat.places, self.x, section(mine, "x"))
            restore(self.held, w.flat.places, section(mine, "rule"))
            self.go_on(w)
        meet(w)
