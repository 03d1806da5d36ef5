"""Gossip: no server; after its own step each worker averages with one other worker, chosen at random among all.

split  data        when  every `period` steps, never in lock step     who  any other worker
what   any rounding Codec          how   any Rule, on the worker's own weights

    main program                            communication activity
    x^ <- x                                 owns x; answers peers also while the main program computes
    g = gradient(x^)
    g ----------------------------------->  x' <- x + rule(g);  choose a peer j
                                            pull       x_i <- (x_i' + x_j) / 2
                                            push       send x_i' to j;  x_i <- (x_i' + sum received) / (1 + received)
    <----------------------------- x        pairwise   x_i, x_j <- (x_i' + x_j) / 2

A pushed model is averaged at the receiver's next step. Only pairwise averaging keeps the mean of all x; the other modes
keep it in expectation over the random choices. Only in pairwise mode x changes while a gradient is computed; otherwise
x^ = x. The answer is the mean of all x.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

from manyhands.core.barrier import barrier
from manyhands.core.codec import Codec
from manyhands.core.declared_state import StateParts
from manyhands.core.encoder import check_rounds
from manyhands.core.errors import refuse_unless
from manyhands.core.gather import gather
from manyhands.core.rule import Rule
from manyhands.core.strategy import Batch, Strategy, Traits, Weights
from manyhands.core.worker import Worker
from manyhands.peers import PairwiseAverage, PeerExchange, PeerLoop, PeerModel, PullAverage, PushAverage

EXCHANGES: dict[str, Callable[[PeerModel], PeerExchange]] = {
    "push": PushAverage,
    "pull": PullAverage,
    "pairwise": PairwiseAverage,
}

LAGS = {
    "push": "models of peers received since x was read, which the same step averages",
    "pull": "a worker's weights change only in its own step, also by what it pulls",
    "pairwise": "averages that peers have begun with this worker since x^ was read",
}
"""What a lag counts."""


@dataclass
class Gossip(Strategy):
    """Asynchronous decentralised training with random peers.

    Args:
        rule: how a worker applies its gradient.
        mode: whose weights change: the requesting worker's (pull), the receiver's (push), or both (pairwise).
        period: tau, steps between two exchanges that a worker starts.
        codec: encodes x; None: it is sent uncompressed.
    """

    rule: Rule
    mode: Literal["push", "pull", "pairwise"] = "pull"
    period: int = 1
    codec: Codec | None = None

    @property
    def traits(self) -> Traits:
        pulls = self.mode == "pull"
        return Traits(
            lockstep=False,
            on_worker_loss="continues",
            bounded=False,
            lag="always 0" if pulls else "counted",
            lag_counts=LAGS[self.mode],
        )

    def __post_init__(self) -> None:
        refuse_unless(self.mode in EXCHANGES, "mode", self.mode, f"one of {', '.join(EXCHANGES)}")
        refuse_unless(self.period >= 1, "period", self.period, ">= 1")
        if self.codec is not None:
            check_rounds(self.codec)

    def setup(self, w: Worker) -> None:
        """x, and the activity that owns it; the model's own weights are x^."""
        self.own = PeerModel(w, self.rule, codec=self.codec)
        self.loop = PeerLoop(self.own, EXCHANGES[self.mode](self.own), "before", lambda: self._chosen(w))

    def step(self, w: Worker, batch: Batch) -> float:
        """Compute at x^; update x and average it with a peer's; read x."""
        loss = w.gradient(batch)
        self.loop.take_step()
        return loss

    def _chosen(self, w: Worker) -> Iterator[int]:
        """All other workers in random order, or none if no exchange is due."""
        if (w.step + 1) % self.period:
            return iter(())
        return random_order(w.workers, {w.rank, *self.loop.lost}, w.random)

    def finish(self, w: Worker) -> None:
        """Wait until all workers have taken their last step: until then they may start exchanges with this one."""
        gather(w)

    def answer(self, w: Worker) -> Weights | None:
        """The mean of all workers' x."""
        return self.own.mean()

    # -- checkpoints ------------------------------------------------------------------------------

    def quiesce(self, w: Worker) -> None:
        """After the barrier all pushed models have arrived; average them, because no step may follow."""
        self.finish(w)
        barrier(w)
        self.loop.settle()

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


def random_order(ranks: Sequence[int], without: Collection[int], draw: Random) -> Iterator[int]:
    """All ranks except some, each once, in random order.

    They are drawn one by one, because usually only the first is used. Only the ranks that are left out or drawn are
    listed, so neither time nor memory grows with the number of ranks.
    """
    taken = sorted(ranks.index(rank) for rank in without)
    while len(taken) < len(ranks):
        index = draw.randrange(len(ranks) - len(taken))
        for earlier in taken:
            index += earlier <= index
        insort(taken, index)
        yield ranks[index]
