"""Elastic: every worker trains its own weights, pulled towards a centre by a spring.

split  data        when  every `period` steps; in lock step, or on each worker's own clock
who    a collective (synchronous), parameter-server shards (asynchronous)
what   any Codec that Rounds (asynchronous), any Codec without a memory (synchronous)
how    the elastic move beside any local Rule

    e_k = alpha (x_k - c)
    x_k <- x_k - eta g_k(x_k) - e_k          gradient at x_k BEFORE the elastic move
    c   <- c + sum_k e_k                     synchronous: Jacobi, all at time t
    c   <- c + e_k                           asynchronous: one exchange, c read fresh

alpha is the strength of the spring. beta = P alpha says the same of the centre, which, if synchronous, moves by beta
times its distance to the mean of all x_k. One is given and the other follows: what the centre gains the workers lose.

With a codec C (and its decoder D) both directions of an exchange are encoded, and both sides move by the same number.
So the centre gains what its worker loses, whatever is rounded: only gradients move x_k + c.

    worker  C(x_k)  --------------------------------->  s = C(alpha (D(C(x_k)) - c));  c <- c + D(s)
            e_k = D(s)  <-----------------------------  s

Synchronous, the difference from the centre is encoded, D(C(x_k - c)), and both move by that; what the codec leaves out
remains in the difference, so later exchanges contain it.

With `momentum` delta a worker's own step has momentum, in Nesterov's first form; the elastic move has none:

    v_k <- delta v_k - eta g_k(x_k + delta v_k)
    x_k <- x_k + v_k - e_k

The answer is the centre c.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from manyhands.codecs import Raw
from manyhands.collectives import collective
from manyhands.collectives.compressed import Gather
from manyhands.consistency import Free
from manyhands.core.codec import Codec
from manyhands.core.declared_state import CustomState, RuleState, StateParts, VectorState
from manyhands.core.encoder import check_rounds, codec_for_span
from manyhands.core.errors import refuse_unless
from manyhands.core.flat import Span
from manyhands.core.gather import gather
from manyhands.core.lag import StepLag, applied_at
from manyhands.core.rule import Rule, UpdateContext
from manyhands.core.state import load_vectors, named
from manyhands.core.strategy import Batch, Strategy, Traits, Weights
from manyhands.core.weight_slice import replica_slices
from manyhands.core.worker import Worker
from manyhands.servers import ServerSetup, Sharding, check_servers, connect, read_outcome, serve

STAYS = "what is not sent remains in the difference to the centre, and need not be remembered"

CENTER_RATE = 0.9
"""beta as in the paper, if neither rate is given."""


@dataclass
class Elastic(Strategy):
    """Elastic averaging.

    Args:
        rule: how a worker applies its own gradient.
        center_rate: beta, how fast the centre follows; None: P alpha, or 0.9 if neither is given.
        moving_rate: alpha, how strongly a worker and the centre pull each other; None: beta / P.
        period: tau, steps between elastic moves; the first one is at step 0.
        asynchronous: each worker exchanges with the centre on its own clock.
        shard: how the centre is cut over the shards (asynchronous).
        momentum: delta, the fraction of a worker's last step that is repeated.
        codec: C, what x and e (asynchronous), or the difference from the centre, are encoded with.
    """

    rule: Rule
    center_rate: float | None = None
    moving_rate: float | None = None
    period: int = 1
    asynchronous: bool = False
    shard: Sharding = "size"
    momentum: float = 0.0
    codec: Codec = field(default_factory=Raw)

    def __post_init__(self) -> None:
        for name, rate in ("center_rate", self.center_rate), ("moving_rate", self.moving_rate):
            refuse_unless(0 <= (rate or 0.0) <= 1, name, rate, "0 to 1")
        refuse_unless(self.period >= 1, "period", self.period, ">= 1")
        refuse_unless(0 <= self.momentum < 1, "momentum", self.momentum, ">= 0 and < 1")
        if self.asynchronous:
            check_rounds(self.codec)
        forgets = self.codec.memory(torch.empty(0)) is None
        refuse_unless(forgets, "codec", self.codec, f"one without a memory: {STAYS}")

    @property
    def traits(self) -> Traits:
        """Only asynchronous workers use servers, continue after a loss, and can be joined."""
        free = self.asynchronous
        loss: Literal["ends", "continues"] = "continues" if free else "ends"
        return Traits(
            lockstep=not free,
            on_worker_loss=loss,
            servers=free,
            joiners=free,
            bounded=not free,
            keeps_changes=True,
            lag="counted" if free else "always 0",
            lag_counts="moves of the centre by other workers between two exchanges of this one, at an exchange"
            if free
            else "the centre and all workers move together",
        )

    def check(self, workers: int, servers: int, batch_size: int, model: nn.Module) -> None:
        """Every server needs a part of the centre; only asynchronous workers use servers; both rates say the same."""
        refuse_unless(self.asynchronous or servers == 0, "servers", servers, "0 unless asynchronous")
        check_servers(servers, model)
        self._check_rates(workers)

    def _check_rates(self, workers: int) -> None:
        """The spring pulls both ends alike, and all springs together pull the centre at most to the mean."""
        alpha, beta = self.moving_rate, self.center_rate
        if alpha is None:
            return
        same, product = beta is None or math.isclose(beta, workers * alpha), f"{workers} workers x moving_rate {alpha}"
        refuse_unless(same, "center_rate", beta, f"{workers * alpha:g} = {product}: give only one of the two")
        within, most = self.asynchronous or workers * alpha <= 1 + 1e-9, f"{1 / workers:g} = 1 / {workers} workers"
        refuse_unless(within, "moving_rate", alpha, f"<= {most}, unless asynchronous: the centre would overshoot")

    def _alpha(self, workers: int) -> float:
        """As given, or beta / P."""
        if self.moving_rate is not None:
            return self.moving_rate
        return (CENTER_RATE if self.center_rate is None else self.center_rate) / workers

    @property
    def _server_setup(self) -> ServerSetup:
        return ServerSetup(self.shard, Free(), self.rule, self.codec)

    def setup(self, w: Worker) -> None:
        """x, the worker's own weights; v, their last step; c, the centre (synchronous).

        Asynchronous: the clients of the centre's shards, and the moves that each had made when this worker read it.
        """
        self.slices = replica_slices(w.ops, w.flat, self.rule)
        self.velocity = [torch.zeros_like(group.weights) for group in w.flat.groups] if self.momentum else []
        self.alpha = self._alpha(len(w.workers))
        if self.asynchronous:
            self.clients = connect(w, self._server_setup)
            self.moved_at = dict.fromkeys(self.clients, 0)
        else:
            self.center = [group.weights.clone() for group in w.flat.groups]
            self.sum = collective("auto", w.transport, w.workers)
            self.gather = None if self.codec == Raw() else Gather(w, self.codec)

    def step(self, w: Worker, batch: Batch) -> float:
        """Exchange with the centre if it is time, and step by the own gradient, computed before that exchange."""
        exchanges = w.step % self.period == 0
        if self.asynchronous:
            moves = self._exchange(w) if exchanges else None
            loss = self._gradient(w, batch)
        else:
            loss = self._gradient(w, batch)
            moves = self._move_together(w) if exchanges else None
        self._update(w, moves)
        return loss

    @torch.no_grad()
    def _gradient(self, w: Worker, batch: Batch) -> float:
        """At x, or with momentum at x + delta v."""
        if not self.velocity:
            return w.gradient(batch)
        x = [w.ops.clone(group.weights) for group in w.flat.groups]
        for group, v in zip(w.flat.groups, self.velocity, strict=True):
            w.ops.add(group.weights, v, scale=self.momentum)
        loss = w.gradient(batch)
        for group, old in zip(w.flat.groups, x, strict=True):
            w.ops.copy(old, group.weights)
        return loss

    @torch.no_grad()
    def _move_together(self, w: Worker) -> list[Tensor]:
        """Synchronous: all workers and the centre move in the same step."""
        moves = []
        for number, (group, c) in enumerate(zip(w.flat.groups, self.center, strict=True)):
            away = w.ops.difference(group.weights, c)
            moves.append(w.ops.scale(self._all_reduce(w, away, number), self.alpha))
            w.ops.add(c, away, scale=self.alpha)
        return moves

    def _all_reduce(self, w: Worker, away: Tensor, number: int) -> Tensor:
        """Sum the differences of all workers in place; returns this worker's, as the others have decoded it."""
        mine = w.ops.clone(away)
        if self.gather is None:
            self.sum.all_reduce(away)
            return mine
        span = Span(number, 0, away.numel())
        self.gather.all_reduce(away, span)
        return w.ops.decode(codec_for_span(self.codec, span, w.flat.slots), self.gather.last_payload, mine)

    def _exchange(self, w: Worker) -> list[Tensor]:
        """Asynchronous: send x to every shard of the centre, receive the move e, both encoded."""
        moves = [torch.empty_like(group.weights) for group in w.flat.groups]
        versions, lags = [], []
        for client in self.clients:
            payload = [w.ops.encoded(self.codec, w.flat.weights(span)) for span in client.spans]
            version, move_parts = client.exchange(payload, self.alpha)
            for (group, start, stop), part in zip(client.spans, move_parts, strict=True):
                w.ops.decode(self.codec, part, moves[group][start:stop])
            lags.append(version - 1 - self.moved_at[client])
            versions.append(version)
            self.moved_at[client] = version
        apart = max(versions) - min(versions) if len(versions) > 1 else None
        w.lag = StepLag(applied_at(max(lags)), apart)
        return moves

    @torch.no_grad()
    def _update(self, w: Worker, moves: list[Tensor] | None) -> None:
        """x <- x - e + rule(g), or x - e + v; each is computed at the x before both."""
        for number, (group, weight_slice) in enumerate(zip(w.flat.groups, self.slices, strict=True)):
            if moves is not None:
                w.ops.add(group.weights, moves[number], scale=-1)
            before, untouched = w.ops.clone(group.weights) if self.velocity else group.weights, group.untouched()
            weight_slice.update(group.grad, UpdateContext(weight_slice.weights, samples=w.samples), untouched)
            if self.velocity and w.ops.computes(group.weights, passes=3):
                for _, start, stop in (slot.span for slot in group.slots if slot.param_id not in untouched):
                    x, old, v = (one[start:stop] for one in (group.weights, before, self.velocity[number]))
                    torch.add(old, v.mul_(self.momentum).add_(x - old), out=x)

    def join_running(self, w: Worker) -> None:
        """Join the shards of the centre, and begin with its weights."""
        for client in self.clients:
            client.join()
            client.ask()
            client.pull([w.flat.weights(span) for span in client.spans])
            self.moved_at[client] = client.version

    def finish(self, w: Worker) -> None:
        """Asynchronous: leave the shards of the centre."""
        if self.asynchronous:
            for client in self.clients:
                client.done()

    def serve(self, w: Worker) -> None:
        """Hold a shard of the centre."""
        if self.asynchronous:
            serve(w, self._server_setup)

    def answer(self, w: Worker) -> Weights | None:
        """The weights of the centre."""
        if gather(w) is None:
            return None
        if not self.asynchronous:
            return w.named(self.center)
        x = [group.weights.clone() for group in w.flat.groups]
        center = w.named() if read_outcome(w, self.clients) else None
        load_vectors(w.flat.slots, [group.weights for group in w.flat.groups], named(w.flat.slots, x))
        return center

    # -- checkpoints ------------------------------------------------------------------------------

    def quiesce(self, w: Worker) -> None:
        """Asynchronous: leave the shards of the centre for now, so that it can be read."""
        if self.asynchronous:
            for client in self.clients:
                client.quiesce()

    def resume(self, w: Worker) -> None:
        """Asynchronous: join the shards again."""
        if self.asynchronous:
            for client in self.clients:
                client.join()

    def declared_state(self, w: Worker) -> StateParts:
        """Every worker's x, v and rule state; a new worker begins at the centre with a fresh rule."""
        slots, x = w.flat.slots, [group.weights for group in w.flat.groups]
        unused = CustomState("own", dict, lambda saved: None)  # without momentum a saved v has no effect: v <- 0 v - ..
        return {
            "x": VectorState(slots, x, "own"),
            "v": VectorState(slots, self.velocity, "own") if self.velocity else unused,
            "rule": RuleState(slots, self.slices, "own"),
        }
