"""Server: workers pull weights from server shards and push gradients to them.

split  data        when  any Consistency        who  parameter-server shards
what   any Codec   how   any Rule, at the shard

    worker                                    shard (servers/shard.py)
    if step % fetch_every == 0: pull -> p     admit? send w : park
    g = gradient(p, batch)
    accrued += g;  p <- p - local_lr g        (local steps only between fetches)
    if it is time: push accrued, accrued = 0  ready? w <- w + rule(g), version += 1
                   (or their mean)

With fetch_every = push_every = 1, which is the usual case, this is pull, gradient, push. With `prefetch` a worker pulls
right after its push instead, so that the next step computes on weights that were read before it began. `phase` is when
a period of several steps pushes: "start" at steps 0, n, 2n, ... as in Downpour's appendix (the first push contains one
gradient), "end" after every n-th step. Gradients that remain at the end of the run are pushed then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from manyhands.codecs import Raw
from manyhands.core.barrier import barrier
from manyhands.core.codec import Codec
from manyhands.core.consistency import WAITING, Consistency, Picks
from manyhands.core.declared_state import CustomState, NumberState, RemoteState, StateParts
from manyhands.core.encoder import Encoder, check_alone
from manyhands.core.errors import Refused, refuse_unless
from manyhands.core.gather import gather
from manyhands.core.lag import StepLag, largest
from manyhands.core.rule import Rule, corrects
from manyhands.core.state import StateSlice, add, named
from manyhands.core.strategy import Batch, Saved, Strategy, Traits, Weights
from manyhands.core.worker import Worker
from manyhands.servers import (
    AggregationTree,
    ServerSetup,
    ShardClient,
    Sharding,
    check_servers,
    connect,
    read_outcome,
    serve,
    waves,
)
from manyhands.servers.pending_gradients import Payload
from manyhands.strategies.warm_start import WarmStart


@dataclass
class Server(Strategy):
    """Any method with a parameter server.

    Args:
        when: when workers agree.
        rule: how a shard applies a gradient.
        codec: what a push is encoded with.
        shard: how the weights are cut over the shards.
        fetch_every: n_fetch, steps between pulls.
        push_every: n_push, steps between pushes.
        prefetch: pull right after pushing.
        phase: whether a period begins or ends with its push.
        local_lr: alpha, the learning rate of local steps between fetches.
        push_mean: push the mean of the accrued gradients instead of their sum.
        draws_from_all: whether every worker may see any sample, instead of having a share of its own.
        warm_start: steps that the first worker takes alone before the others begin.
        groups: how many groups of neighbouring workers push one sum each, through an aggregator; 0: no groups.
        copies: how many servers hold each shard.
    """

    when: Consistency
    rule: Rule
    codec: Codec = field(default_factory=Raw)
    shard: Sharding = "size"
    fetch_every: int = 1
    push_every: int = 1
    prefetch: bool = False
    phase: Literal["start", "end"] = "start"
    local_lr: float = 0.0
    push_mean: bool = False
    draws_from_all: bool = False
    warm_start: int = 0
    groups: int = 0
    copies: Literal[1, 2] = 1

    def __post_init__(self) -> None:
        check_alone(self.codec)
        refuse_unless(self.fetch_every >= 1, "fetch_every", self.fetch_every, ">= 1")
        refuse_unless(self.push_every >= 1, "push_every", self.push_every, ">= 1")
        refuse_unless(0 <= self.local_lr < math.inf, "local_lr", self.local_lr, ">= 0 and finite")
        refuse_unless(self.warm_start >= 0, "warm_start", self.warm_start, ">= 0")
        refuse_unless(self.copies in (1, 2), "replicas", self.copies, "1 or 2")
        alone = self.copies == 1 or self.when.scope == "shard"
        refuse_unless(alone, "replicas", self.copies, f"1: with {self.when} one shard decides for all")
        refuse_unless(self.copies == 1 or not self.groups, "replicas", self.copies, "1: with groups of workers")
        refuse_unless(self.groups == 0 or self.groups >= 2, "groups", self.groups, ">= 2, or 0 for none")
        if self.groups and "seen" in self.rule.needs:
            raise Refused(
                f"{self.rule} needs the weights that each gradient was computed at, "
                f"but groups is {self.groups}, and the sum of a group was not computed at any: groups must be 0"
            )
        refuse_unless(self.phase in ("start", "end"), "phase", repr(self.phase), "'start' or 'end'")
        if self.when.merges and "seen" in self.rule.needs:
            alone = corrects(self.rule)
            if not alone or self.when.admit(WAITING):
                why = "lets its worker continue before that" if alone else "makes one gradient of several"
                raise Refused(
                    f"{self.rule} needs the weights that each gradient was computed at when it is applied, "
                    f"but {self.when} {why}"
                )

    @property
    def traits(self) -> Traits:
        """Aggregators and replicated shards take no joiners and are not read between steps."""
        direct = not self.groups and self.copies == 1
        return Traits(
            lockstep=not self.when.tolerates_loss,
            on_worker_loss="continues" if self.when.tolerates_loss else "ends",
            servers=True,
            joiners=self.when.tolerates_loss and direct,
            bounded=self.when.bounds_clocks or not self.when.tolerates_loss,
            draws_from_all=self.draws_from_all,
            peekable=direct,
            may_end_early=True,
            averages_gradients=not self.when.tolerates_loss,
            needs_whole_model="each part would choose whose gradients it waits for" if self.when.scope == "job" else "",
            lag="counted",
            lag_counts="updates of a shard" + (", a worker's own included" if self.fetch_every > 1 else ""),
        )

    def check(self, workers: int, servers: int, batch_size: int, model: nn.Module) -> None:
        """Every server needs some parameters, a copy needs another server, and a group needs a worker."""
        check_servers(servers, model)
        apart = self.copies == 1 or servers >= 2
        refuse_unless(apart, "replicas", self.copies, f"1 with {servers} servers: two copies need two servers")
        refuse_unless(self.groups <= workers, "groups", self.groups, f"<= {workers}, the number of workers")
        self._server_setup(workers)

    def _server_setup(self, workers: int) -> ServerSetup:
        """What these knobs ask of the servers with that many workers."""
        tree = AggregationTree(self.groups, Raw()) if self.groups else None
        when = self.when.among(self.groups or workers) if isinstance(self.when, Picks) else self.when
        return ServerSetup(self.shard, when, self.rule, self.codec, tree, self.copies)

    def setup(self, w: Worker) -> None:
        """Clients of the shards; codec memory in parameter coordinates; what was accrued since the last push."""
        setup = self._server_setup(len(w.workers))
        self.when = setup.when
        self.clients = connect(w, setup)
        self.waves = waves(self.clients, self.when)
        self.views = {client: [w.flat.weights(span) for span in client.spans] for client in self.clients}
        """This worker's weights, as each shard cuts them."""
        self.read: set[ShardClient] = set()
        """The shards whose newest weights the last push has read into `views`."""
        self.unconfirmed: list[tuple[ShardClient, Payload]] = []
        """Pushes since the last pull that the codec could take back: the next pull says whether they were refused."""
        self.warming = WarmStart(w, self.warm_start)
        self.encoder = Encoder(w, self.codec)
        self.remembers = self.encoder.remembers
        self.accrued: list[Tensor] | None = None
        self.accruals = 0
        self.untouched: frozenset[int] = frozenset()
        self.simple = self.fetch_every == self.push_every == 1
        self.read_versions: list[int] = []
        """The versions of the shards that were read in this step."""
        self.ahead: int | None = None
        """How many clocks this worker was ahead of the slowest when it read last, if clocks are bounded."""
        if self.prefetch and w.rank in w.workers:
            self._pull(w)

    def join_running(self, w: Worker) -> None:
        """Join every shard at its slowest clock, and read; this waits for no other worker."""
        self.warming.is_over = True
        for client in self.clients:
            client.join()
        self._pull(w)

    def step(self, w: Worker, batch: Batch) -> float:
        """Pull, compute, push."""
        if not self.warming.is_over:
            self.warming.wait(w, self.clients)
        if not self.prefetch and w.step % self.fetch_every == 0:
            self._pull(w)
        loss = w.gradient(batch)
        if not self.simple:
            self._accrue(w)
        if (w.step + (self.phase == "end")) % self.push_every == 0:
            self._push(w)
        if self.prefetch and (w.step + 1) % self.fetch_every == 0:
            self._pull(w)
        w.lag = self._lag()
        return loss

    def _lag(self) -> StepLag:
        """What has become known of this worker's gradients since the last step, and of its reads in this one."""
        outcomes = largest([client.outcomes() for client in self.clients])
        versions, self.read_versions = self.read_versions, []
        apart = max(versions) - min(versions) if len(versions) > 1 else None
        return StepLag(outcomes, apart, self.ahead)

    def _pull(self, w: Worker) -> None:
        """Read all shards; each may keep this worker waiting until it is admitted."""
        refused = set()
        for wave in self.waves:
            for client in wave:
                client.ask()
            for client in wave:
                if client.pull(self.views[client], client in self.read):
                    refused.add(client)
        self.read.clear()
        self.read_versions = [client.version for client in self.clients]
        if self.when.bounds_clocks:
            self.ahead = max([client.ahead for client in self.clients])
        if self.unconfirmed:
            for client, payload in self.unconfirmed:
                if client in refused:
                    self._take_back(client, payload)
            self.unconfirmed = []

    @torch.no_grad()
    def _accrue(self, w: Worker) -> None:
        """Sum gradients in a buffer of their own, because a pushed one is lent, and take a local step."""
        totals = self._so_far(w)
        self.accruals += 1
        self.untouched &= w.flat.untouched()
        for total, group in zip(totals, w.flat.groups, strict=True):
            w.ops.add(total, group.grad)
            w.ops.add(group.weights, group.grad, scale=-self.local_lr)

    def _so_far(self, w: Worker) -> list[Tensor]:
        """What has accrued since the last push: zeros at first, with every parameter untouched."""
        if self.accrued is None:
            self.accrued = [w.ops.zeros_like(group.grad) for group in w.flat.groups]
            self.untouched = frozenset(slot.param_id for slot in w.flat.slots)
        return self.accrued

    def _push(self, w: Worker) -> None:
        """Encode and push the gradient of every shard's spans."""
        grads = self.accrued or [group.grad for group in w.flat.groups]
        untouched = w.flat.untouched() if self.accrued is None else self.untouched
        param_ids = self._without_residual(w, untouched) if untouched else ()
        steps, self.accrued, self.accruals = max(1, self.accruals), None, 0
        if self.push_mean and steps > 1:
            grads = [w.ops.divide(g, steps) for g in grads]
        for client in self.clients:
            payload = [self.encoder.encode(grads[span.group], span) for span in client.spans]
            pushed = client.push_pull(payload, param_ids, self.views[client] if self.simple else (), steps)
            if pushed.read:
                self.read.add(client)
            if pushed.refused:
                self._take_back(client, payload)
            elif self.remembers:
                self.unconfirmed.append((client, payload))

    def _without_residual(self, w: Worker, untouched: frozenset[int]) -> list[int]:
        """Of these untouched parameters, those of which the codec's memory holds nothing that is still to be sent."""
        spans = {slot.param_id: slot.span for slot in w.flat.slots if slot.param_id in untouched}
        return [param_id for param_id, span in spans.items() if not self.encoder.has_left(span)]

    def _take_back(self, client: ShardClient, payload: Payload) -> None:
        """Return a refused gradient to the codec's memory, so that it is sent with the next one."""
        for span, tensors in zip(client.spans, payload, strict=True):
            self.encoder.take_back(span, tensors)

    def finish(self, w: Worker) -> None:
        """Push what has accrued, and leave every shard."""
        self.warming.release(w, for_good=True)
        if self.accrued is not None:
            self._push(w)
        for client in self.clients:
            client.done()

    def serve(self, w: Worker) -> None:
        """Hold a shard."""
        serve(w, self._server_setup(len(w.workers)))

    def answer(self, w: Worker) -> Weights | None:
        """The weights of the shards when every worker has finished or quiesced."""
        if gather(w) is None or not read_outcome(w, self.clients):
            return None
        self.read.clear()
        return w.named()

    def peek(self, w: Worker) -> Weights:
        """The current weights of the shards; no clock advances."""
        found = [torch.empty_like(group.weights) for group in w.flat.groups]
        for client in self.clients:
            client.peek([found[group][start:stop] for group, start, stop in client.spans])
        return w.named(found)

    # -- checkpoints ------------------------------------------------------------------------------

    def quiesce(self, w: Worker) -> None:
        """Leave the shards for now, so that no worker waits for this one; accrued gradients remain here."""
        self.warming.release(w, for_good=False)
        for client in self.clients:
            client.quiesce()

    def resume(self, w: Worker) -> None:
        """Join all shards again, all workers at the same clock, then read as a resumed run does."""
        for client in self.clients:
            client.join()
        self._begin_again(w)

    def _begin_again(self, w: Worker) -> None:
        """No worker pushes before all have joined; local steps since the last fetch are discarded."""
        barrier(w)
        if self.prefetch or w.step % self.fetch_every:
            self._pull(w)

    def declared_state(self, w: Worker) -> StateParts:
        """The state of the shards; every worker's codec memory and accrued gradients, which others may inherit."""
        return {
            "rule": RemoteState(self._shard_slices, self._restore_shards),
            "memory": CustomState("inherited", self.encoder.state, self.encoder.inherit),
            "accrued": CustomState("inherited", partial(self._accrued_by_name, w), partial(self._inherit, w)),
            "accruals": NumberState(self, "accruals", "inherited"),
        }

    def _shard_slices(self) -> list[StateSlice]:
        return [one for client in self.clients for one in client.state()]

    def _restore_shards(self, saved: Saved) -> None:
        for client in self.clients:
            client.restore(saved)

    def _accrued_by_name(self, w: Worker) -> Saved:
        touched = [slot for slot in w.flat.slots if slot.param_id not in self.untouched]
        return {} if self.accrued is None else named(touched, self.accrued)

    def _inherit(self, w: Worker, saved: Sequence[Saved]) -> None:
        """Add the accrued gradients of workers of the saved run."""
        for accrued in saved:
            if accrued:
                self.simple = False
                add(w.flat.slots, self._so_far(w), accrued)
                self.untouched -= {slot.param_id for slot in w.flat.slots if slot.name in accrued}

    def restored(self, w: Worker) -> None:
        """Read the restored weights."""
        self._begin_again(w)
