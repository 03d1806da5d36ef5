"""Gossip: no server; after its own step each worker averages with one other, chosen among all at random.

split  data        when  every `period` steps, never in lock step     who  anybody
what   any Codec that Rounds       how   any Rule, on the worker's own weights

    main program                            communication
    x^ <- x                                 owns x; answers peers also while the main program computes
    g = gradient(x^)
    hand over g  ------------------------>  x' <- x + rule(g);  choose a peer j
                                            pull       x_i <- (x_i' + x_j) / 2
                                            push       send x_i' to j;  x_i <- (x_i' + sum received) / (1 + received)
    <----------------------------- x        pairwise   x_i, x_j <- (x_i' + x_j) / 2

A push is received when it comes and averaged at the receiver's next step. Only pairwise averaging keeps the mean of all
x; with the others it is kept on average over whom chance chooses. Only there x moves while a gradient is computed: with
the others x^ = x. The answer is the mean of all x.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from manyhands.core.errors import PeerLost, refuse_unless
from manyhands.core.gather import gather
from manyhands.core.meeting import meet
from manyhands.core.protocols import Batch, Codec, Message, Rule, Saved, Tag, Weights, recv
from manyhands.core.sending import check_rounds
from manyhands.core.worker import Worker
from manyhands.topology.peers import GRADIENT, Exchange, Others, Own, Pairing, Pulling, Pushing, shuffled

SETTLE, SETTLED = Tag("settle", carries="nothing"), Tag("settled", carries="nothing")
EXCHANGES: dict[str, Callable[[Own], Exchange]] = {"push": Pushing, "pull": Pulling, "pairwise": Pairing}


@dataclass
class Gossip:
    """Asynchronous decentralised training by rumour.

    Args:
        rule: how a worker applies its gradient.
        mode: who changes: the one who asks (pull), the one who is sent to (push), or both (pairwise).
        period: tau, steps between two exchanges of a worker's own.
        codec: what x looks like on the wire; as it is, if not given.
    """

    rule: Rule
    mode: Literal["push", "pull", "pairwise"] = "pull"
    period: int = 1
    codec: Codec | None = None
    lockstep: ClassVar[bool] = False
    one_host: ClassVar[bool] = False

    def __post_init__(self) -> None:
        refuse_unless(self.mode in EXCHANGES, "mode", self.mode, f"one of {', '.join(EXCHANGES)}")
        refuse_unless(self.period >= 1, "period", self.period, ">= 1")
        if self.codec is not None:
            check_rounds(self.codec)

    def setup(self, w: Worker) -> None:
        """x, what is averaged; the model's own weights are x^, what is computed on; all others are peers."""
        self.own = Own(w, self.rule, codec=self.codec)
        self.exchange: Exchange = EXCHANGES[self.mode](self.own)
        self.peers = Others(w.workers)
        self.peers.remove(w.rank)
        w.transport.spawn(lambda: self.communicate(w), daemon=True)

    def step(self, w: Worker, batch: Batch) -> float:
        """Compute at x^; hand over the gradient; read x again."""
        loss = w.gradient(batch)
        self.own.take_step()
        return loss

    # -- the communication activity, sole owner of x ----------------------------------------------

    def communicate(self, w: Worker) -> None:
        """Answer peers, and carry out our own exchanges, one message at a time."""
        while True:
            try:
                message = recv(w.transport, GRADIENT, SETTLE, *self.exchange.tags)
            except PeerLost as loss:
                self.peers.remove(loss.rank)
                over = self.exchange.forget(loss.rank)
            else:
                over = self.take(w, message)
            if over:
                self.own.give_back()

    def take(self, w: Worker, message: Message) -> bool:
        """Step by a gradient and begin an exchange, or go on with one; is our own over now?"""
        if message.tag == GRADIENT:
            self.own.update(message)
            return self.exchange.begin(self.chosen(w))
        if message.tag == SETTLE:
            self.exchange.begin(iter(()))
            w.transport.send(w.rank, SETTLED)
            return False
        return self.exchange.hear(message)

    def chosen(self, w: Worker) -> Iterator[int]:
        """The peer to meet after this step and, should it refuse or be lost, others; nobody if it is not time."""
        return shuffled(self.peers, w.random) if (w.step + 1) % self.period == 0 else iter(())

    # -- the end ----------------------------------------------------------------------------------

    def finish(self, w: Worker) -> None:
        """Peers may still want to average with us: wait until all have taken their last step."""
        gather(w)

    def answer(self, w: Worker) -> Weights | None:
        """The mean of everyone's x."""
        return self.own.mean()

    # -- checkpoints ------------------------------------------------------------------------------

    def rest(self, w: Worker) -> None:
        """Once all have met, every push has come; average what there is, since no step may follow here."""
        self.finish(w)
        meet(w)
        w.transport.send(w.rank, SETTLE)
        recv(w.transport, SETTLED, frm=w.rank)

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
