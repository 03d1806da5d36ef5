"""Elastic: every worker explores on its own, tied to a centre by a spring.

split  data        when  every `period` steps; in lock step, or on each worker's own clock
who    a collective (synchronous), parameter-server shards (asynchronous)
what   any Codec that Rounds (asynchronous), any Codec without a memory (synchronous)
how    the elastic move beside any local Rule

    e_k = alpha (x_k - c)
    x_k <- x_k - eta g_k(x_k) - e_k          gradient at x_k BEFORE the elastic move
    c   <- c + sum_k e_k                     synchronous (beta = P alpha): Jacobi, all at time t
    c   <- c + e_k                           asynchronous: one exchange, c read fresh

With a codec C (and D, which decodes) both ways of an exchange are encoded, and both sides move by the same number. So
what the centre gains its worker loses, whatever is rounded: x_k + c is moved by gradients alone.

    worker  C(x_k)  --------------------------------->  s = C(alpha (D(C(x_k)) - c));  c <- c + D(s)
            e_k = D(s)  <-----------------------------  s

Synchronous, it is the way from the centre that is encoded, D(C(x_k - c)), and both move by that; what is left out stays
between them, and is told later by itself.

With `momentum` delta a worker's own move has inertia, in Nesterov's first form; the spring has none:

    v_k <- delta v_k - eta g_k(x_k + delta v_k)
    x_k <- x_k + v_k - e_k

The answer is the centre c.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from manyhands.codecs import Raw
from manyhands.consistency import Free
from manyhands.core.errors import refuse_unless
from manyhands.core.flat import Span
from manyhands.core.gather import gather
from manyhands.core.holding import replica
from manyhands.core.protocols import At, Batch, Codec, Rule, Saved, Weights
from manyhands.core.saving import collect, join, named, own, pieces, place, restore, section, under
from manyhands.core.sending import check_rounds, over
from manyhands.core.worker import Worker
from manyhands.topology.collectives import all_reducer
from manyhands.topology.servers import Sharding, check_servers, connect, read_outcome, serve
from manyhands.topology.servers.inbox import encoded
from manyhands.topology.sums import Gather

STAYS = "what is not sent stays between a worker and the centre, and need not be remembered"


@dataclass
class Elastic:
    """Elastic averaging.

    Args:
        rule: how a worker applies its own gradient.
        center_rate: beta, how fast the centre follows.
        moving_rate: alpha, how strongly a worker is pulled; None: beta / P.
        period: tau, steps between elastic moves; the first one is at step 0.
        asynchronous: each worker meets the centre on its own clock.
        shard: how the centre is cut over the shards (asynchronous).
        momentum: delta, what remains of a worker's last move.
        codec: C, what x and e look like on the wire (asynchronous), or the way from the centre.
    """

    rule: Rule
    center_rate: float = 0.9
    moving_rate: float | None = None
    period: int = 1
    asynchronous: bool = False
    shard: Sharding = "size"
    momentum: float = 0.0
    codec: Codec = field(default_factory=Raw)
    one_host: ClassVar[bool] = False

    def __post_init__(self) -> None:
        refuse_unless(0 <= self.center_rate <= 1, "center_rate", self.center_rate, "0 to 1")
        alpha = self.moving_rate or 0.0
        refuse_unless(0 <= alpha <= 1, "moving_rate", self.moving_rate, "0 to 1")
        refuse_unless(self.period >= 1, "period", self.period, ">= 1")
        refuse_unless(0 <= self.momentum < 1, "momentum", self.momentum, ">= 0 and < 1")
        if self.asynchronous:
            check_rounds(self.codec)
        forgets = self.codec.memory(torch.empty(0)) is None
        refuse_unless(forgets, "codec", self.codec, f"one without a memory: {STAYS}")
        self.lockstep = not self.asynchronous

    def check(self, workers: int, servers: int, batch_size: int, model: nn.Module) -> None:
        """The centre must be large enough to be cut; only asynchronous workers meet it at a server."""
        refuse_unless(self.asynchronous or servers == 0, "servers", servers, "0 unless asynchronous")
        check_servers(servers, model)

    def setup(self, w: Worker) -> None:
        """x, the worker's own weights; v, their last move; c, the centre (synchronous) or the lanes to it."""
        self.held = replica(w.flat, self.rule)
        self.velocity = [torch.zeros_like(part.weights) for part in w.flat.parts] if self.momentum else []
        self.alpha = self.center_rate / len(w.workers) if self.moving_rate is None else self.moving_rate
        if self.asynchronous:
            self.lanes = connect(w, self.shard, Free(), self.rule, self.codec)
        else:
            self.center = [part.weights.clone() for part in w.flat.parts]
            self.sum = all_reducer("auto", w.transport, w.workers)
            self.told = None if self.codec == Raw() else Gather(w, self.codec)

    def step(self, w: Worker, batch: Batch) -> float:
        """Meet the centre if it is time, then step by one's own gradient, taken before the meeting."""
        meets = w.step % self.period == 0
        if self.asynchronous:
            moves = self.exchange(w) if meets else None
            loss = self.gradient(w, batch)
        else:
            loss = self.gradient(w, batch)
            moves = self.meet(w) if meets else None
        self.update(w, moves)
        return loss

    @torch.no_grad()
    def gradient(self, w: Worker, batch: Batch) -> float:
        """At x, or with momentum at x + delta v."""
        if not self.velocity or w.flat.is_meta:
            return w.gradient(batch)
        x = [part.weights.clone() for part in w.flat.parts]
        for part, v in zip(w.flat.parts, self.velocity, strict=True):
            part.weights.add_(v, alpha=self.momentum)
        loss = w.gradient(batch)
        for part, old in zip(w.flat.parts, x, strict=True):
            part.weights.copy_(old)
        return loss

    @torch.no_grad()
    def meet(self, w: Worker) -> list[Tensor]:
        """Synchronous: all workers and the centre move at once."""
        moves = []
        for number, (part, c) in enumerate(zip(w.flat.parts, self.center, strict=True)):
            away = part.weights - c
            moves.append(self.alpha * self.add_up(w, away, number))
            c.add_(away, alpha=self.center_rate / len(w.workers))
            w.move(3 * away.nbytes)
        return moves

    def add_up(self, w: Worker, away: Tensor, number: int) -> Tensor:
        """Sum over all workers how far each is away, in place; returns how far this one is, as the others see it."""
        mine = away.clone()
        if self.told is None:
            self.sum.all_reduce(away)
            return mine
        span = Span(number, 0, away.numel())
        self.told.add_up(away, span)
        if not mine.is_meta:
            over(self.codec, span, w.flat.places).decode(self.told.told, mine)
        return mine

    def exchange(self, w: Worker) -> list[Tensor]:
        """Asynchronous: send x to every shard of the centre, get the move e back, both encoded."""
        moves = [torch.zeros_like(part.weights) for part in w.flat.parts]
        if self.codec != Raw():
            w.move(sum(e.nbytes for e in moves))
        for lane in self.lanes:
            payload = [encoded(self.codec, w.flat.weights(span)) for span in lane.spans]
            for (part, start, stop), told in zip(lane.spans, lane.exchange(payload, self.alpha), strict=True):
                if not moves[part].is_meta:
                    self.codec.decode(told, moves[part][start:stop])
        return moves

    @torch.no_grad()
    def update(self, w: Worker, moves: list[Tensor] | None) -> None:
        """x <- x - e + rule(g), or x - e + v; neither move has seen the other."""
        for number, (part, held) in enumerate(zip(w.flat.parts, self.held, strict=True)):
            if moves is not None and not part.weights.is_meta:
                part.weights.sub_(moves[number])
            before, untouched = part.weights.clone() if self.velocity else part.weights, part.untouched()
            held.update(part.grad, At(held.weights, samples=w.samples), untouched)
            if self.velocity and not part.weights.is_meta:
                for _, start, stop in (place.span for place in part.places if place.mark not in untouched):
                    x, old, v = (one[start:stop] for one in (part.weights, before, self.velocity[number]))
                    torch.add(old, v.mul_(self.momentum).add_(x - old), out=x)

    @property
    def welcomes(self) -> bool:
        """In lock step nobody is expected later."""
        return self.asynchronous

    def arrive(self, w: Worker) -> None:
        """Come to the centre, and begin there."""
        for lane in self.lanes:
            lane.join()
            lane.ask()
            lane.pull([w.flat.weights(span) for span in lane.spans])

    def finish(self, w: Worker) -> None:
        """Take leave of the centre."""
        if self.asynchronous:
            for lane in self.lanes:
                lane.done()

    def serve(self, w: Worker) -> None:
        """Keep a shard of the centre."""
        if self.asynchronous:
            serve(w, self.shard, Free(), self.rule, self.codec)

    def answer(self, w: Worker) -> Weights | None:
        """The centre."""
        if gather(w) is None:
            return None
        if not self.asynchronous:
            return w.named(self.center)
        x = [part.weights.clone() for part in w.flat.parts]
        center = w.named() if read_outcome(w, self.lanes) else None
        place(w.flat.places, [part.weights for part in w.flat.parts], named(w.flat.places, x))
        return center

    # -- checkpoints ------------------------------------------------------------------------------

    def rest(self, w: Worker) -> None:
        """Asynchronous: let the shards of the centre know, so that it can be read."""
        if self.asynchronous:
            for lane in self.lanes:
                lane.rest()

    def go_on(self, w: Worker) -> None:
        """Asynchronous: come back to the shards."""
        if self.asynchronous:
            for lane in self.lanes:
                lane.join()

    def state(self, w: Worker) -> Saved | None:
        """Every worker's x and v, and what its rule remembers."""
        x = named(w.flat.places, [part.weights for part in w.flat.parts])
        v = named(w.flat.places, self.velocity) if self.velocity else {}
        mine = under("x", x) | under("v", v) | under("rule", join(pieces(self.held, w.flat.places)))
        return collect(w, mine, of_all=self.lockstep)

    def restore(self, w: Worker, saved: Saved) -> None:
        """Each its own; a new worker begins at the centre with a fresh rule."""
        if mine := own(w, saved):
            place(w.flat.places, [part.weights for part in w.flat.parts], section(mine, "x"))
            place(w.flat.places, self.velocity, section(mine, "v"))
            restore(self.held, w.flat.places, section(mine, "rule"))
