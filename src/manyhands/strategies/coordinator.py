"""The coordinator of Sandblaster: it has no weights, it tells others what to do, in numbers and names.

    collect   wait until every worker has brought its mini-batches: together they are one batch
    improve   g at w;  then some times:  d = -H g,  search along d,  w <- w + t d,  remember (t d, g' - g)
    evaluate  a pass: hand out portions to free replicas until all their gradients have reached the keepers

All passes of a batch see the same samples, by the same portions, and dropout falls alike: so losses can be compared,
and a difference of gradients tells of the curvature and not of other data.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from manyhands.core.errors import Diverged, PeerLost
from manyhands.core.protocols import Message, Tag
from manyhands.core.worker import Worker
from manyhands.rules.lbfgs import History, direction
from manyhands.rules.wolfe import LineSearch, Trial
from manyhands.topology.keeping import RESULT
from manyhands.topology.portions import Portions
from manyhands.topology.sharded import Sharded, total

BRING = Tag("bring")
REST_NOW, NO_MORE = Tag("rest-now", carries="nothing"), Tag("no-more", carries="nothing")
IMPROVED, RESTED = Tag("improved", carries="nothing"), Tag("rested", carries="nothing")
ORDER = Tag("order")
FREE, END = Tag("free", credit=64, carries="nothing"), Tag("end", carries="nothing")

DOWNHILL = 1e-9
"""A direction must go down more steeply than that, or there is nothing to gain."""


class Portion(NamedTuple):
    """A few samples of a mini-batch: whose it is, from which step, and which of its samples."""

    owner: int
    step: int
    start: int
    stop: int
    names: tuple[str, ...]
    fields: tuple[Tensor, ...]


class Knobs(NamedTuple):
    """What a coordinator must know."""

    lr: float
    history: int
    portion: int
    batches: int
    iterations: int
    search: LineSearch


class Coordinator:
    """An activity of the first worker. Its state is numbers; vectors are with the keepers."""

    def __init__(self, w: Worker, sharded: Sharded, knobs: Knobs) -> None:
        self._t = w.transport
        self._sharded = sharded
        self._knobs = knobs
        self.history = History(knobs.history)
        self.moves = 0
        """How often the weights have moved."""
        self._living = set(w.workers)
        self._free = list(w.workers)
        self._brought: dict[int, list[Portion]] = {rank: [] for rank in w.workers}
        self._batches: dict[int, int] = dict.fromkeys(w.workers, 0)
        self._rests: set[int] = set()
        self._left: set[int] = set()
        self._batch: list[Portion] = []
        self._pass = 0
        self._portions = Portions([])
        self._results: list[float] = []
        """Of those keepers that have every portion of the pass."""
        self._handle: dict[Tag, Callable[[Message], None]] = {
            BRING: self._take_in,
            REST_NOW: lambda message: self._rests.add(message.frm),
            NO_MORE: lambda message: self._left.add(message.frm),
            FREE: self._set_free,
            RESULT: lambda message: self._results.append(message.meta[0]),
        }

    # -- who is there -----------------------------------------------------------------------------

    def run(self) -> None:
        """Batch after batch, until nobody has any more."""
        while self._living - self._left:
            self._collect()
            if any(self._brought.values()):
                loss = self._improve()
                self._answer(IMPROVED, [rank for rank in self._living if self._is_full(rank)], loss)
                self._batches = dict.fromkeys(self._batches, 0)
            elif self._rests:
                self._answer(RESTED, self._rests)
                self._rests = set()
        self._let_finish()
        self._answer(END, self._living)

    def _collect(self) -> None:
        """Wait until every worker has brought all it can, and every replica is at rest if somebody wants that."""
        while any(not self._is_full(rank) for rank in self._living - self._rests - self._left):
            self._hear(BRING, REST_NOW, NO_MORE, FREE)
        if self._rests:
            self._let_finish()

    def _let_finish(self) -> None:
        """Wait for replicas that still compute what nobody needs any more."""
        while not self._living <= set(self._free):
            self._hear(FREE)

    def _is_full(self, rank: int) -> bool:
        return self._batches[rank] == self._knobs.batches

    def _answer(self, tag: Tag, ranks: set[int] | list[int], *meta: float) -> None:
        for rank in sorted(ranks):
            self._t.send(rank, tag, meta)

    def _hear(self, *tags: Tag, timeout: float | None = None) -> None:
        try:
            message = self._t.recv(*tags, timeout=timeout)
        except PeerLost as loss:
            self._lose(loss)
            return
        if message is not None:
            self._handle[message.tag](message)

    def _lose(self, loss: PeerLost) -> None:
        """A replica can be spared, a keeper cannot. What the replica has brought is still to be used."""
        if loss.rank in self._sharded.spans:
            raise loss
        self._living.discard(loss.rank)
        self._rests.discard(loss.rank)
        self._free = [rank for rank in self._free if rank != loss.rank]
        self._portions.lose(loss.rank)

    def _take_in(self, message: Message) -> None:
        step, names = message.meta
        fields, size = message.keep(), self._knobs.portion
        samples = len(fields[0])
        for start in range(0, samples, size):
            stop = min(start + size, samples)
            cut = tuple(field[start:stop] for field in fields)
            self._brought[message.frm].append(Portion(message.frm, step, start, stop, names, cut))
        self._batches[message.frm] += 1

    # -- one batch --------------------------------------------------------------------------------

    def _improve(self) -> float:
        """Some iterations of L-BFGS on one batch; its loss before them."""
        self._batch = [portion for rank in sorted(self._brought) for portion in self._brought[rank]]
        self._brought = {rank: [] for rank in self._brought}
        name, first, _ = self._evaluate(0.0, "size", "g")
        self._refuse_divergence()
        now = Trial(0.0, first, 0.0, name)
        for _ in range(self._knobs.iterations):
            found = self._iterate(now)
            if found is None:
                break
            now = found
        self._sharded.drop(now.gradient)
        self._sharded.tell()
        return first

    def _iterate(self, now: Trial) -> Trial | None:
        """One step of L-BFGS from a point whose gradient is known; None if there is nothing to gain."""
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
        else:  # these pairs do not lead on from here
            self.history.clear(sharded)
        for trial in [now, *tried]:
            if trial.gradient != found.gradient:
                sharded.drop(trial.gradient)
        return found if found.t else None

    def _try(self, t: float) -> Trial:
        """Loss and slope at w + t d; infinitely high if either is no number."""
        name, loss, slope = self._evaluate(t, "dot", "g", "d")
        fits = math.isfinite(loss) and math.isfinite(slope)
        return Trial(t, loss, slope, name) if fits else Trial(t, math.inf, math.nan, name)

    def _refuse_divergence(self) -> None:
        for portion, loss in zip(self._batch, self._portions.losses, strict=True):
            if not math.isfinite(loss):
                raise Diverged(portion.owner, portion.step, loss)

    # -- one pass ---------------------------------------------------------------------------------

    def _evaluate(self, t: float, *question: str) -> tuple[str, float, float]:
        """The gradient at w + t d has this name; the batch's loss there; what was asked about the gradient."""
        self._pass += 1
        self._sharded.open(self._pass, t)
        self._portions = Portions([portion.owner for portion in self._batch], self._portions.usual)
        self._go_on_until(lambda: self._portions.done)
        name, samples = f"g{self._pass}", sum(portion.stop - portion.start for portion in self._batch)
        self._sharded.close(name, len(self._batch), samples)
        self._sharded.ask(*(name if word == "g" else word for word in question))
        self._results = []
        self._go_on_until(lambda: len(self._results) == len(self._sharded.spans))
        return name, sum(self._portions.losses) / samples, total(self._results)

    def _go_on_until(self, holds: Callable[[], bool]) -> None:
        """Hand out portions; also such as were pushed by a replica that is lost since: they may never arrive."""
        self._hand_out()
        while not holds():
            self._hear(FREE, RESULT, timeout=self._portions.patience(self._free, self._t.now()))
            self._hand_out()

    def _hand_out(self) -> None:
        """Give free replicas something to do; the samples go along, unless they are the replica's own."""
        for rank in list(self._free):
            number = self._portions.take(rank, self._t.now())
            if number is not None:
                self._free.remove(rank)
                portion = self._batch[number]
                fields = () if rank == portion.owner else portion.fields
                self._t.send(rank, ORDER, (self._pass, number, *portion[:5]), fields)

    def _set_free(self, message: Message) -> None:
        """A replica has pushed a portion, or found that it was too late."""
        number, portion, loss = message.meta
        if message.frm in self._living:
            self._free.append(message.frm)
            if number == self._pass:
                self._portions.pushed(portion, message.frm, loss, self._t.now())
