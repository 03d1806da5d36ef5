"""The coordinator of Sandblaster: it holds no weights, and sends commands of numbers and names to the other ranks.

    collect   wait until every worker has sent its mini-batches: together they are one batch
    improve   g at w;  then some times:  d = -H g,  search along d,  w <- w + t d,  store (t d, g' - g)
    evaluate  a pass: assign portions to free replicas until all their gradients have reached the vector servers

All passes of a batch use the same samples, the same portions and the same random numbers (dropout): so losses can be
compared, and a difference of gradients measures the curvature, not a difference of data.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from manyhands.core.errors import Diverged, PeerLost
from manyhands.core.port import Message, Tag
from manyhands.core.worker import Worker
from manyhands.rules.lbfgs import History, direction
from manyhands.rules.wolfe import LineSearch, Trial
from manyhands.strategies.sandblaster.portions import Portions
from manyhands.strategies.sandblaster.sharded_vectors import ShardedVectors, total
from manyhands.strategies.sandblaster.vector_server import RESULT

MINI_BATCH = Tag("mini-batch")
QUIESCE_NOW, NO_MORE = Tag("quiesce-now", carries="nothing"), Tag("no-more", carries="nothing")
IMPROVED, IDLE = Tag("improved", carries="nothing"), Tag("idle", carries="nothing")
ORDER = Tag("order")
FREE, END = Tag("free", credit=64, carries="nothing"), Tag("end", carries="nothing")

DOWNHILL = 1e-9
"""If the slope of a direction is not below the negative of this, the search ends."""


class Portion(NamedTuple):
    """A few samples of a mini-batch: its worker and step, and the range of its samples."""

    owner: int
    step: int
    start: int
    stop: int
    names: tuple[str, ...]
    fields: tuple[Tensor, ...]


class Knobs(NamedTuple):
    """The knobs of the strategy that the coordinator needs."""

    lr: float
    history: int
    portion: int
    batches: int
    iterations: int
    search: LineSearch


class Coordinator:
    """An activity of the first worker. Its state is numbers; vectors are on the vector servers."""

    def __init__(self, w: Worker, sharded: ShardedVectors, knobs: Knobs) -> None:
        self._t = w.transport
        self._sharded = sharded
        self._knobs = knobs
        self.history = History(knobs.history)
        self.moves = 0
        """How many steps the weights have taken."""
        self._alive = set(w.workers)
        self._free = list(w.workers)
        self._waiting: dict[int, list[Portion]] = {rank: [] for rank in w.workers}
        """For each worker the portions of the next batch."""
        self._batches: dict[int, int] = dict.fromkeys(w.workers, 0)
        self._quiescing: set[int] = set()
        self._left: set[int] = set()
        self._batch: list[Portion] = []
        self._pass = 0
        self._portions = Portions([])
        self._results: list[float] = []
        """The results of the vector servers that have received every portion of the pass."""
        self._handle: dict[Tag, Callable[[Message], None]] = {
            MINI_BATCH: self._add_portions,
            QUIESCE_NOW: lambda message: self._quiescing.add(message.frm),
            NO_MORE: lambda message: self._left.add(message.frm),
            FREE: self._set_free,
            RESULT: lambda message: self._results.append(message.meta[0]),
        }

    # -- the workers ------------------------------------------------------------------------------

    def run(self) -> None:
        """Improve on one batch after the other, until no worker has any more."""
        while self._alive - self._left:
            self._collect()
            if any(self._waiting.values()):
                loss = self._improve()
                self._answer(IMPROVED, [rank for rank in self._alive if self._is_full(rank)], loss)
                self._batches = dict.fromkeys(self._batches, 0)
            elif self._quiescing:
                self._answer(IDLE, self._quiescing)
                self._quiescing = set()
        self._await_replicas()
        self._answer(END, self._alive)

    def _collect(self) -> None:
        """Wait until every worker has sent all it can, and for all replicas if a worker quiesces."""
        while any(not self._is_full(rank) for rank in self._alive - self._quiescing - self._left):
            self._receive(MINI_BATCH, QUIESCE_NOW, NO_MORE, FREE)
        if self._quiescing:
            self._await_replicas()

    def _await_replicas(self) -> None:
        """Wait for replicas that still compute portions of a finished pass."""
        while not self._alive <= set(self._free):
            self._receive(FREE)

    def _is_full(self, rank: int) -> bool:
        return self._batches[rank] == self._knobs.batches

    def _answer(self, tag: Tag, ranks: set[int] | list[int], *meta: float) -> None:
        for rank in sorted(ranks):
            self._t.send(rank, tag, meta)

    def _receive(self, *tags: Tag, timeout: float | None = None) -> None:
        try:
            message = self._t.recv(*tags, timeout=timeout)
        except PeerLost as loss:
            self._lose(loss)
            return
        if message is not None:
            self._handle[message.tag](message)

    def _lose(self, loss: PeerLost) -> None:
        """The loss of a vector server ends the run; of a lost replica, the samples it has sent are still used."""
        if loss.rank in self._sharded.spans:
            raise loss
        self._alive.discard(loss.rank)
        self._quiescing.discard(loss.rank)
        self._free = [rank for rank in self._free if rank != loss.rank]
        self._portions.lose(loss.rank)

    def _add_portions(self, message: Message) -> None:
        step, names = message.meta
        fields, size = message.keep(), self._knobs.portion
        samples = len(fields[0])
        for start in range(0, samples, size):
            stop = min(start + size, samples)
            cut = tuple(field[start:stop] for field in fields)
            self._waiting[message.frm].append(Portion(message.frm, step, start, stop, names, cut))
        self._batches[message.frm] += 1

    # -- one batch --------------------------------------------------------------------------------

    def _improve(self) -> float:
        """Some iterations of L-BFGS on one batch; returns its loss before them."""
        self._batch = [portion for rank in sorted(self._waiting) for portion in self._waiting[rank]]
        self._waiting = {rank: [] for rank in self._waiting}
        name, first, _ = self._evaluate(0.0, "size", "g")
        self._refuse_divergence()
        now = Trial(0.0, first, 0.0, name)
        for _ in range(self._knobs.iterations):
            found = self._iterate(now)
            if found is None:
                break
            now = found
        self._sharded.drop(now.gradient)
        self._sharded.send()
        return first

    def _iterate(self, now: Trial) -> Trial | None:
        """One step of L-BFGS from a point whose gradient is known; None if no step reduces the loss."""
        sharded, knobs = self._sharded, self._knobs
        direction(sharded, self.history, now.gradient)
        slope = sharded.dot(now.gradient, "d")
        if slope > -DOWNHILL:
            return None
        tried: list[Trial] = []

        def evaluate(t: float) -> Trial:
            tried.append(self._try(t))
            return tried[-1]

        start = now._replace(t=0.0, slope=slope)
        t = knobs.lr * (1.0 if self.moves else min(1.0, 1.0 / sharded.size(now.gradient)))
        found = knobs.search(evaluate, start, t, sharded.reach("d"))
        if found.t:
            sharded.add(found.t, "d", "w")
            self.history.learn(sharded, found.t, now.gradient, found.gradient)
            self.moves += 1
        else:  # the pairs give no descent direction here
            self.history.clear(sharded)
        for trial in [now, *tried]:
            if trial.gradient != found.gradient:
                sharded.drop(trial.gradient)
        return found if found.t else None

    def _try(self, t: float) -> Trial:
        """Loss and slope at w + t d; an infinite loss if either is not finite."""
        name, loss, slope = self._evaluate(t, "dot", "g", "d")
        fits = math.isfinite(loss) and math.isfinite(slope)
        return Trial(t, loss, slope, name) if fits else Trial(t, math.inf, math.nan, name)

    def _refuse_divergence(self) -> None:
        for portion, loss in zip(self._batch, self._portions.losses, strict=True):
            if not math.isfinite(loss):
                raise Diverged(portion.owner, portion.step, loss)

    # -- one pass ---------------------------------------------------------------------------------

    def _evaluate(self, t: float, *question: str) -> tuple[str, float, float]:
        """Compute the gradient at w + t d; returns its name, the batch's loss there, and the result of a question."""
        self._pass += 1
        self._sharded.open(self._pass, t)
        self._portions = Portions([portion.owner for portion in self._batch], self._portions.usual)
        self._assign_until(lambda: self._portions.done)
        name, samples = f"g{self._pass}", sum(portion.stop - portion.start for portion in self._batch)
        self._sharded.close(name, len(self._batch), samples)
        self._sharded.ask(*(name if word == "g" else word for word in question))
        self._results = []
        self._assign_until(lambda: len(self._results) == len(self._sharded.spans))
        return name, sum(self._portions.losses) / samples, total(self._results)

    def _assign_until(self, holds: Callable[[], bool]) -> None:
        """Assign portions; also those of a lost replica, whose pushes may never arrive."""
        self._assign()
        while not holds():
            self._receive(FREE, RESULT, timeout=self._portions.patience(self._free, self._t.now()))
            self._assign()

    def _assign(self) -> None:
        """Assign portions to free replicas; the samples are sent too, unless they are the replica's own."""
        for rank in list(self._free):
            number = self._portions.take(rank, self._t.now())
            if number is not None:
                self._free.remove(rank)
                portion = self._batch[number]
                fields = () if rank == portion.owner else portion.fields
                self._t.send(rank, ORDER, (self._pass, number, *portion[:5]), fields)

    def _set_free(self, message: Message) -> None:
        """A replica has pushed a portion, or found that the pass was over."""
        number, portion, loss = message.meta
        if message.frm in self._alive:
            self._free.append(message.frm)
            if number == self._pass:
                self._portions.pushed(portion, message.frm, loss, self._t.now())
