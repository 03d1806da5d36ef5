"""Server: workers pull weights from server shards and push gradients to them.

split  data        when  any Consistency        who  parameter-server shards
what   any Codec   how   any Rule, at the shard

    worker                                    shard (topology/servers/shard.py)
    if step % fetch_every == 0: pull -> p     admit? send w : park
    g = gradient(p, batch)
    accrued += g;  p <- p - local_lr g        (local steps only between fetches)
    if it is time: push accrued, accrued = 0  ready? w <- w + rule(g), version += 1
                   (or their mean)

With fetch_every = push_every = 1, which is the usual case, this is pull, gradient, push. `prefetch`
pulls right after the push instead, so that the next step computes on weights read before it began.
`phase` says when a push of several steps falls: "start" pushes at steps 0, n, 2n, ... as in Downpour's
appendix (the first push carries one gradient), "end" after every n-th step. Whatever is left at the end
of the run is pushed then.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from manyhands.codecs import Raw
from manyhands.core.errors import Refused, refuse_unless
from manyhands.core.gather import gather
from manyhands.core.holding import corrects
from manyhands.core.meeting import meet
from manyhands.core.protocols import WAITING, Batch, Codec, Consistency, Picks, Rule, Saved, Weights
from manyhands.core.saving import add, collect, inherited, join, named, section, under
from manyhands.core.sending import Sender, check_alone
from manyhands.core.worker import Worker
from manyhands.strategies.warm_start import WarmStart
from manyhands.topology.servers import Lane, Sharding, Tree, check_servers, connect, read_outcome, serve, waves
from manyhands.topology.servers.inbox import Payload


def among(when: Consistency, workers: int) -> Consistency:
    """What it means with that many workers."""
    return when.among(workers) if isinstance(when, Picks) else when


@dataclass
class Server:
    """Any method with a parameter server.

    Args:
        when: when workers agree.
        rule: how a shard applies a gradient.
        codec: what a push looks like on the wire.
        shard: how the weights are cut over the shards.
        fetch_every: n_fetch, steps between pulls.
        push_every: n_push, steps between pushes.
        prefetch: pull right after pushing.
        phase: whether a period begins or ends with its push.
        local_lr: alpha, the learning rate of local steps between fetches.
        push_mean: push the mean of the accrued gradients instead of their sum.
        draws_from_all: whether every worker may see any sample, instead of having a share of its own.
        warm_start: steps that the first worker takes alone before the others begin.
        groups: how many groups of neighbours come to the shards as one each, by way of a relay; 0: no groups.
        copies: how many servers keep each shard.
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
    one_host: ClassVar[bool] = False

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
        if self.phase not in ("start", "end"):
            raise Refused(f"phase is {self.phase!r}, but must be 'start' or 'end'")
        if self.when.merges and "seen" in self.rule.needs:
            alone = corrects(self.rule)
            if not alone or self.when.admit(WAITING):
                why = "lets its worker read on before that" if alone else "makes one gradient of several"
                raise Refused(
                    f"{self.rule} needs the weights that each gradient was computed at when it is applied, "
                    f"but {self.when} {why}"
                )
        self.lockstep = not self.when.tolerates_loss

    def check(self, workers: int, servers: int, batch_size: int, model: nn.Module) -> None:
        """There must be something to keep for every server, another server for a copy, and workers enough."""
        check_servers(servers, model)
        apart = self.copies == 1 or servers >= 2
        refuse_unless(apart, "replicas", self.copies, f"1 with {servers} servers: two keep a shard only if there are 2")
        refuse_unless(self.groups <= workers, "groups", self.groups, f"<= {workers}, the number of workers")
        among(self.when, self.groups or workers)

    @property
    def tree(self) -> Tree | None:
        """How workers come to the shards, if not each by itself."""
        return Tree(self.groups, Raw()) if self.groups else None

    def setup(self, w: Worker) -> None:
        """Lanes to the shards; codec memory in parameter coordinates; what is not yet pushed, of how many steps."""
        self.when = among(self.when, self.groups or len(w.workers))
        self.lanes: list[Lane] = connect(w, self.shard, self.when, self.rule, self.codec, self.tree, self.copies)
        self.waves = waves(self.lanes, self.when)
        self.warming = WarmStart(w, self.warm_start)
        self.sender = Sender(w, self.codec)
        self.pushed: list[tuple[Lane, Payload]] = []
        self.accrued: list[Tensor] | None = None
        self.accruals = 0
        self.untouched: frozenset[int] = frozenset()
        self.simple = self.fetch_every == self.push_every == 1
        if self.prefetch and w.rank in w.workers:
            self.pull(w)

    @property
    def welcomes(self) -> bool:
        """Groups are made when a run begins; of a shard with two keepers both would have to be told."""
        return not self.lockstep and not self.groups and self.copies == 1

    def arrive(self, w: Worker) -> None:
        """Come to every shard at its slowest clock, read, and wait for nobody."""
        self.warming.is_over = True
        for lane in self.lanes:
            lane.join()
        self.pull(w)

    def step(self, w: Worker, batch: Batch) -> float:
        """Pull, compute, push."""
        if not self.warming.is_over:
            self.warming.wait(w, self.lanes)
        if not self.prefetch and w.step % self.fetch_every == 0:
            self.pull(w)
        loss = w.gradient(batch)
        if not self.simple:
            self.accrue(w)
        if self.pushes_at(w.step):
            self.push(w)
        if self.prefetch and (w.step + 1) % self.fetch_every == 0:
            self.pull(w)
        return loss

    def pull(self, w: Worker) -> None:
        """Read all shards; each may keep us waiting until it admits us."""
        for wave in self.waves:
            for lane in wave:
                lane.ask()
            for lane in wave:
                lane.pull([w.flat.weights(span) for span in lane.spans])
        w.lag = max(lane.lag for lane in self.lanes)
        self.take_back()

    def pushes_at(self, step: int) -> bool:
        """Whether this step ends with a push."""
        return (step + (self.phase == "end")) % self.push_every == 0

    @torch.no_grad()
    def accrue(self, w: Worker) -> None:
        """Add up gradients in a buffer of our own, since a pushed one is lent; step locally meanwhile."""
        totals = self.so_far(w)
        self.accruals += 1
        self.untouched &= w.flat.untouched()
        for total, part in zip(totals, w.flat.parts, strict=True):
            total.add_(part.grad)
            part.weights.add_(part.grad, alpha=-self.local_lr)

    def so_far(self, w: Worker) -> list[Tensor]:
        """What has accrued since the last push: nothing at first, and nothing is touched."""
        if self.accrued is None:
            self.accrued = [torch.zeros_like(part.grad) for part in w.flat.parts]
            self.untouched = frozenset(place.mark for place in w.flat.places)
        return self.accrued

    def push(self, w: Worker) -> None:
        """Encode and hand over the gradient of every shard's spans."""
        grads = self.accrued or [part.grad for part in w.flat.parts]
        untouched = self.unmoved(w, w.flat.untouched() if self.accrued is None else self.untouched)
        steps, self.accrued, self.accruals = max(1, self.accruals), None, 0
        if self.push_mean and steps > 1:
            grads = [g.div_(steps) for g in grads]
        for lane in self.lanes:
            into = [w.flat.weights(span) for span in lane.spans] if self.simple else ()
            payload = [self.sender.encode(grads[span.part], span) for span in lane.spans]
            lane.push(payload, untouched, into, steps)
            if self.sender.remembers:
                self.pushed.append((lane, payload))

    def unmoved(self, w: Worker, untouched: frozenset[int]) -> list[int]:
        """The parameters that a push says nothing about: untouched ones, unless the codec still has some of them."""
        spans = {place.mark: place.span for place in w.flat.places if place.mark in untouched}
        return [mark for mark, span in spans.items() if not self.sender.has_left(span)]

    def take_back(self) -> None:
        """What was not accepted goes into the codec's memory, to be sent with the next gradient."""
        for lane, payload in self.pushed:
            for span, tensors in zip(lane.spans, payload, strict=True) if lane.refused else ():
                self.sender.take_back(span, tensors)
        self.pushed = []

    def finish(self, w: Worker) -> None:
        """Push what is left, say good-bye to every shard."""
        self.warming.let_go(w, for_good=True)
        if self.accrued is not None:
            self.push(w)
        for lane in self.lanes:
            lane.done()

    def serve(self, w: Worker) -> None:
        """Keep a shard."""
        serve(
            w,
            self.shard,
            among(self.when, self.groups or len(w.workers)),
            self.rule,
            self.codec,
            self.tree,
            self.copies,
        )

    def answer(self, w: Worker) -> Weights | None:
        """What the shards hold when everyone is done."""
        if gather(w) is None or not read_outcome(w, self.lanes):
            return None
        return w.named()

    @property
    def looks(self) -> bool:
        """By way of relays, or at the second keeper of a shard, nobody looks."""
        return not self.groups and self.copies == 1

    def look(self, w: Worker) -> Weights:
        """What the shards hold now; nobody's clock is touched."""
        found = [torch.empty_like(part.weights) for part in w.flat.parts]
        for lane in self.lanes:
            lane.look([found[part][start:stop] for part, start, stop in lane.spans])
        return w.named(found)

    # -- checkpoints ------------------------------------------------------------------------------

    def rest(self, w: Worker) -> None:
        """Let the shards know, so that nobody waits for us; what is accrued stays with us."""
        self.warming.let_go(w, for_good=False)
        for lane in self.lanes:
            lane.rest()

    def go_on(self, w: Worker) -> None:
        """Come back to all shards, all at the same clock, then read as a resumed run does."""
        for lane in self.lanes:
            lane.join()
        self.begin_again(w)

    def begin_again(self, w: Worker) -> None:
        """Nobody pushes before all are there; local steps since the last fetch are given up."""
        meet(w)
        if self.prefetch or w.step % self.fetch_every:
            self.pull(w)

    def state(self, w: Worker) -> Saved | None:
        """Every worker's codec memory and what it has not pushed; what the shards remember."""
        mine = under("memory", self.sender.state())
        if self.accrued is not None:
            touched = [place for place in w.flat.places if place.mark not in self.untouched]
            mine |= under("accrued", named(touched, self.accrued)) | {"accruals": torch.tensor(self.accruals)}
        saved = collect(w, mine)
        if saved is None:
            return None
        return saved | under("rule", join(piece for lane in self.lanes for piece in lane.state()))

    def restore(self, w: Worker, saved: Saved) -> None:
        """The lead tells the shards; memory and gradients of workers that are gone go to those that are left."""
        if w.rank == w.lead:
            for lane in self.lanes:
                lane.restore(section(saved, "rule"))
        for old in inherited(w, saved):
            self.inherit(w, old)
        self.begin_again(w)

    def inherit(self, w: Worker, old: Saved) -> None:
        """Take over what a worker had not got rid of."""
        accrued = section(old, "accrued")
        self.sender.inherit(section(old, "memory"))
        if accrued:
            self.simple = False
            add(w.flat.places, self.so_far(w), accrued)
            self.accruals += int(old["accruals"])
            self.untouched -= {place.mark for place in w.flat.places if place.name in accrued}
