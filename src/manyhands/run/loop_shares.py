"""The mini-batches of a user's loop of steps: `hands.share`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from manyhands.core.budget import Budget, FixedSteps
from manyhands.core.errors import Refused, refuse_unless
from manyhands.run.batches import Collate, Source, granted, rounds, source
from manyhands.run.loop_signals import LoopStops
from manyhands.run.share_position import after
from manyhands.run.training import Training
from manyhands.splits.data import Share, mixed


class LoopShares(LoopStops):
    """A part of `Hands`: this rank's part of a data set."""

    _budget_for: Callable[[int], Budget]
    _budgets = 0
    _is_sharing = False

    @property
    def _training(self) -> Training:
        raise NotImplementedError

    @property
    def rank(self) -> int:
        """The number of this process."""
        raise NotImplementedError

    @property
    def role(self) -> str:
        """The role of this rank: "worker" or "server"."""
        raise NotImplementedError

    @property
    def workers(self) -> int:
        """How many workers the job began with."""
        raise NotImplementedError

    def _refuse_outside(self, name: str) -> None:
        raise NotImplementedError

    def share(
        self,
        dataset: Any,
        batch_size: int | None = None,
        *,
        epochs: float | None = None,
        steps: int | None = None,
        collate: Collate | None = None,
    ) -> Iterator[Any]:
        """This rank's mini-batches: tuples if a sample is a tuple of fields, dicts if it is a dict.

        Workers in lock step get equally many; others draw from one budget, so that fast workers take more. Called
        again, it continues where it stopped in the data.

        Args:
            dataset: map-style or iterable, or a DataLoader that shuffles. An iterable must be the same on every rank.
            batch_size: samples per mini-batch of one worker.
            epochs: passes over the data by all workers together; 1 by default.
            steps: updates of size replicas x batch_size, instead of epochs.
            collate: makes a mini-batch from a list of samples.
        """
        self._refuse_outside("share")
        self._refuse_another()
        if steps is not None and epochs is not None:
            raise Refused(f"steps is {steps} and epochs is {epochs}, but only one of them can be given")
        refuse_unless(steps is None or steps >= 1, "steps", steps, ">= 1")
        data, epochs = source(dataset, batch_size, collate), 1 if epochs is None else epochs
        passes = data.passes(epochs) if data.is_stream and steps is None else None
        if steps is None and not data.is_stream:
            steps = data.steps(epochs, self._training.replicas)
        done = self._loop.share.begin(data.batch_size)
        batches = self._batches(data, passes, steps, done) if self.role == "worker" else iter(())
        left = max(0, (steps or 0) - done // self._training.replicas)
        self._training.begin(data.batch_size, left, None if data.is_stream else len(data.dataset))
        return self._iterate(self._loop.share.counted(batches))

    def _batches(self, data: Source, passes: int | None, steps: int | None, done: int) -> Iterator[Any]:
        """Those of this replica, without the `done` ones of all replicas that a resumed run has taken."""
        replicas = self._training.replicas
        replica = self.rank * replicas // self.workers
        if data.is_stream:
            return after(islice(rounds(data, replica, replicas, passes), steps), done // replicas)
        assert steps is not None
        share = self._share_of(data, replica, replicas)
        if self._training.strategy.traits.lockstep:
            return granted(share, FixedSteps(max(0, steps - done // replicas)), self.transport)
        return self._granted(share, self._budget_for(max(0, steps * replicas - done)))

    def _granted(self, share: Share, budget: Budget) -> Iterator[Any]:
        """Mini-batches of a share as long as the common budget grants them; this begins when the rank is set up."""
        yield from granted(share, self._training.strategy.share_budget(budget), self.transport)

    def _share_of(self, data: Source, replica: int, replicas: int) -> Share:
        """This replica's share: the last one again for the same data set, else a new one in another random order."""
        last, seed = self._share, self._training.worker.seed
        if last is not None and last.dataset is data.dataset and last.batch_size == data.batch_size:
            return last
        made = self._loop.share.shares
        seed = mixed(seed, made) if made else seed
        self._loop.share.shares += 1
        whole = self._training.strategy.traits.draws_from_all
        self._share = Share(data.dataset, replica, replicas, data.batch_size, seed, data.collate, whole)
        self._loop.share.place(self._share)
        return self._share

    def _iterate(self, batches: Iterator[Any]) -> Iterator[Any]:
        self._refuse_another()
        self._is_sharing = True
        try:
            yield from batches
        finally:
            self._is_sharing = False

    def _refuse_another(self) -> None:
        if self._is_sharing:
            raise Refused("another share is still running, but only one can: finish it first, or close() it")

    def _budget_of_the_runtime(self, batches: int) -> Budget:
        from manyhands.runtime.budget import SharedBudget
        from manyhands.runtime.transport.transport import RealTransport

        assert isinstance(self.transport, RealTransport)
        self._budgets += 1
        return SharedBudget(self.transport, batches, f"budget{self._budgets}", closes=False)
