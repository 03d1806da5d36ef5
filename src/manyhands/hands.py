"""Your own loop: `mh.join` makes this process one of many hands that train one model.

    with mh.join(model, loss=F.cross_entropy, strategy=mh.ssp(staleness=3)) as hands:
        for x, y in hands.share(dataset, batch_size=64, epochs=3):
            loss = hands.step(x, y)

All ranks run the same script. The strategy is set up by the first `share` or `step`, when the batch size is known, from
the lead's weights. The end of the block finishes what is in flight and loads the answer into the model on every rank;
after it the model is an ordinary one again. On a server rank `share` serves until the workers are done and gives
nothing, `step` does the same and leaves the block. An exception leaves the block at once: nobody is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.core.budget import Budget, Each
from manyhands.core.errors import Refused, refuse_unless
from manyhands.core.fields import Fields
from manyhands.core.protocols import Draws, Strategy, Transport
from manyhands.splits.data import Share, mixed
from manyhands.streams import PutTogether, Source, granted, rounds, source
from manyhands.training import Training


class _Served(BaseException):
    """A server rank has served: the rest of the block is not for it."""


class Hands:
    """One rank of a job whose loop is the user's; `join` makes it.

    Args:
        transport: this rank's way to the others.
        model: any module; for pipelines an `nn.Sequential`, or a list of stages.
        strategy: the method, such as `mh.ssp(staleness=3)`.
        loss: `loss(model(*fields), target)`; None if the model returns its own loss.
        optimizer: moves the weights instead of the strategy's own rule; made again where they live.
        seed: everything random depends on it.
        budget_for: gives the one budget that all workers draw so many mini-batches from.
    """

    def __init__(
        self,
        transport: Transport,
        model: nn.Module | Sequence[nn.Module],
        *,
        strategy: Strategy,
        loss: Callable[..., Tensor] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        seed: int = 0,
        budget_for: Callable[[int], Budget] | None = None,
    ) -> None:
        model = model if isinstance(model, nn.Module) else nn.Sequential(*model)
        self.transport = transport
        self._training = Training(transport, model, loss, strategy, optimizer, seed)
        self._budget_for = budget_for or self._budget_of_the_runtime
        self._share: Share | None = None
        self._shares = self._budgets = 0
        self._is_open = self._is_walking = False
        self._led: bool | None = None

    @property
    def rank(self) -> int:
        return self.transport.rank

    @property
    def role(self) -> str:
        """What this rank is: "worker" or "server"."""
        return self.transport.role

    @property
    def workers(self) -> int:
        """How many workers the job began with."""
        return len(self._training.worker.workers)

    @property
    def lead(self) -> bool:
        """Whether this is the one rank that evaluates and saves."""
        return self._training.worker.lead == self.rank if self._led is None else self._led

    @property
    def lag(self) -> int:
        """How stale the last read or gradient was."""
        return self._training.worker.lag

    def __enter__(self) -> Hands:
        if self._is_open or self._training.has_begun:
            raise Refused("these hands have been in use, but a with block needs new ones: join again")
        self._is_open = True
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> bool:
        self._is_open = False
        if error is not None and not isinstance(error, _Served):
            self._training.fail(error)
            return False
        try:
            self._led = self._training.end()
        except BaseException as failure:
            self._training.fail(failure)
            raise
        return True

    def share(
        self,
        dataset: Any,
        batch_size: int | None = None,
        *,
        epochs: float | None = None,
        steps: int | None = None,
        collate: PutTogether | None = None,
    ) -> Iterator[Any]:
        """This rank's mini-batches; a sample that is a tuple of fields gives tuples, a dict gives dicts.

        Workers in lock step get equally many; others draw from one budget, so that the fast ones do more. Called
        again, it goes on with the data where it was.

        Args:
            dataset: map-style or iterable, or a loader that shuffles. A stream must be the same on every rank.
            batch_size: samples per mini-batch of one worker.
            epochs: passes over the data by all workers together; 1 if there are no `steps` either.
            steps: updates of size replicas x batch_size, instead.
            collate: makes a mini-batch of a list of samples.
        """
        self._refuse_outside("share")
        self._refuse_another()
        if steps is not None and epochs is not None:
            raise Refused(f"steps is {steps} and epochs is {epochs}, but only one of them can be given")
        refuse_unless(steps is None or steps >= 1, "steps", steps, ">= 1")
        found, epochs = source(dataset, batch_size, collate), 1 if epochs is None else epochs
        passes = found.passes(epochs) if found.is_stream and steps is None else None
        if steps is None and not found.is_stream:
            steps = found.steps(epochs, self._training.replicas)
        if self._training.streams and steps is None:
            raise Refused("steps is missing: a pipeline that streams must know when its last mini-batch comes")
        batches = iter(()) if self.role == "server" else self._batches(found, passes, steps)
        self._training.begin(found.batch_size, steps or 0, None if found.is_stream else len(found.dataset))
        return self._walk(batches)

    def _batches(self, found: Source, passes: int | None, steps: int | None) -> Iterator[Any]:
        replicas = self._training.replicas
        replica = self.rank * replicas // self.workers
        if found.is_stream:
            return islice(rounds(found, replica, replicas, passes), steps)
        assert steps is not None
        share = self._share_of(found, replica, replicas)
        budget = Each(steps) if self._training.strategy.lockstep else self._budget_for(steps * replicas)
        return granted(share, budget, self.transport)

    def _share_of(self, found: Source, replica: int, replicas: int) -> Share:
        """The walk over a data set goes on where it was; over another one it begins, in another order."""
        last, seed = self._share, self._training.worker.seed
        if last is not None and last.dataset is found.dataset and last.batch_size == found.batch_size:
            return last
        seed = mixed(seed, self._shares) if self._shares else seed
        self._shares += 1
        strategy = self._training.strategy
        whole = isinstance(strategy, Draws) and strategy.draws_from_all
        self._share = Share(found.dataset, replica, replicas, found.batch_size, seed, found.put_together, whole)
        return self._share

    def _walk(self, batches: Iterator[Any]) -> Iterator[Any]:
        self._refuse_another()
        self._is_walking = True
        try:
            yield from batches
        finally:
            self._is_walking = False

    def step(self, *fields: Any, **named: Any) -> float | None:
        """Train on one mini-batch; the newest known loss.

        With a loss the last field is the target. Methods in lock step need equally many steps on every worker.
        """
        self._refuse_outside("step")
        batch = Fields.of(fields, named)
        if not self._training.has_begun:
            self._training.begin(batch.samples, 0)
        if self.role == "server":
            raise _Served
        return self._training.step(batch)

    def _refuse_outside(self, name: str) -> None:
        if not self._is_open:
            raise Refused(f"{name} was called outside the with block of its hands, but must be called within")

    def _refuse_another(self) -> None:
        if self._is_walking:
            raise Refused("another share is still running, but only one can: finish it first, or close() it")

    def _budget_of_the_runtime(self, batches: int) -> Budget:
        from manyhands.runtime.budget import Common
        from manyhands.runtime.transport import RealTransport

        assert isinstance(self.transport, RealTransport)
        self._budgets += 1
        return Common(self.transport, batches, f"budget{self._budgets}")


def join(
    model: nn.Module | Sequence[nn.Module],
    *,
    strategy: Strategy,
    loss: Callable[..., Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    seed: int = 0,
    servers: int | None = None,
) -> Hands:
    """Become one of the hands that train `model`, in a process started by `manyhands run`, torchrun or their like.

    Args:
        model: any module; for pipelines an `nn.Sequential`, or a list of stages.
        strategy: the method, such as `mh.ssp(staleness=3)`.
        loss: `loss(model(*fields), target)`; None if the model returns its own loss.
        optimizer: moves the weights instead of the strategy's own rule; made again where they live.
        seed: everything random depends on it.
        servers: how many of the processes are servers, if the launcher does not say.
    """
    from manyhands.runtime.join import connect
    from manyhands.runtime.last_words import end_in_few_words

    end_in_few_words()
    transport = connect(servers=servers)
    try:
        return Hands(transport, model, strategy=strategy, loss=loss, optimizer=optimizer, seed=seed)
    except BaseException as error:
        transport.fail(error)
        raise
