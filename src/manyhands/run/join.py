"""Your own loop: `mh.join` makes this process one of the ranks that train a model.

    with mh.join(model, loss=F.cross_entropy, strategy=mh.ssp(staleness=3)) as hands:
        for x, y in hands.share(dataset, batch_size=64, epochs=3):
            loss = hands.step(x, y)

All ranks run the same script. The strategy is set up by the first `share` or `step`, when the batch size is known, with
the lead's weights on all ranks. The end of the block completes what is in flight and loads the answer into the model on
every rank; then the model is an ordinary one again. On a server rank `share` serves until the workers have ended and
yields nothing; `step` does the same and leaves the block. An exception leaves the block at once, without waiting for
other ranks.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple, overload

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from manyhands.core.budget import Budget
from manyhands.core.errors import Refused, refuse_unless
from manyhands.core.fields import Fields, StepLoss
from manyhands.core.given_stages import given_model
from manyhands.core.port import Transport
from manyhands.core.record import Line
from manyhands.core.strategy import Strategy
from manyhands.core.team import Team
from manyhands.core.work import note_example
from manyhands.run.live_optimizers import LiveOptimizers
from manyhands.run.loaders import part_of
from manyhands.run.loop_record import LoopRecord, line_sender
from manyhands.run.loop_shares import LoopShares
from manyhands.run.loop_signals import Stopped
from manyhands.run.loop_state import GroupOptions, LoopState
from manyhands.run.methods import chosen_strategy, over_team
from manyhands.run.optimizer_guards import guard_steps, refuse_hooks
from manyhands.run.prepared import LoopObjects, Prepared
from manyhands.run.training import Fails, Training
from manyhands.splits.data import Share

if TYPE_CHECKING:
    from manyhands.runtime.launch.exit_report import ScriptEnd

T = TypeVar("T")
U = TypeVar("U")
Others = TypeVarTuple("Others")


class _Served(SystemExit):
    """Leaves the block on a server rank, or the script if there is no block, once the workers have ended."""


class Hands(LoopRecord, LoopShares):
    """One rank of a job with the user's own loop; made by `join`.

    Args:
        transport: connects this rank with the others.
        model: any module, or a list of pipeline stages.
        strategy: the method, such as `mh.ssp(staleness=3)`.
        loss: `loss(model(*fields), target)`; None if the model returns its own loss.
        optimizer: updates the weights instead of the strategy's own rule, with its options as they are at each step.
        example: inputs of the model for a few samples.
        seed: determines everything random.
        budget_for: makes the common budget of all workers for a number of mini-batches.
        observe: takes the lines of this rank for the record; None: no record is kept.
    """

    def __init__(
        self,
        transport: Transport,
        model: nn.Module | Sequence[nn.Module] | None = None,
        *,
        strategy: Strategy,
        loss: Callable[..., Tensor] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        example: Sequence[Any] | None = None,
        seed: int = 0,
        budget_for: Callable[[int], Budget] | None = None,
        observe: Callable[[Line], None] | None = None,
    ) -> None:
        self.transport = transport
        self._strategy, self._seed = strategy, seed
        self._joined: Training | None = None
        self._guards: list[RemovableHandle] = []
        self._prepared: Prepared | None = None
        self._loop = LoopState()
        if model is not None:
            model = given_model(model)
            if example is not None:
                note_example(model, example)
            self._joined = Training(transport, model, loss, strategy, self._read_only(optimizer, model), seed)
            self._watch_steps(self._joined)
        self._budget_for = budget_for or self._budget_of_the_runtime
        self._share: Share | None = None
        self._budgets = 0
        self._is_open = self._is_sharing = self._ended = False
        self._led: bool | None = None
        self._observe = observe
        self._begin_record(strategy)

    def _read_only(self, optimizer: torch.optim.Optimizer | None, model: nn.Module) -> LiveOptimizers | None:
        """The optimizer of a loop of `step`, whose options are read at each step."""
        if optimizer is None:
            return None
        refuse_hooks(optimizer)
        live = LiveOptimizers([optimizer], dict(model.named_parameters()))
        self._guards = guard_steps(optimizer)
        self._loop.objects = {"optimizer": [GroupOptions(optimizer)]}
        return live

    @property
    def _training(self) -> Training:
        if self._joined is None:
            raise Refused("these hands have no model yet: call prepare(model, optimizer), or join(model, ...)")
        return self._joined

    @property
    def rank(self) -> int:
        return self.transport.rank

    @property
    def role(self) -> str:
        """The role of this rank: "worker" or "server"."""
        return self.transport.role

    @property
    def workers(self) -> int:
        """How many workers the job began with."""
        return self.transport.roles.count("worker") - len(self.transport.pending_ranks)

    @property
    def lead(self) -> bool:
        """Whether this is the rank that evaluates and saves."""
        if self._led is not None or self._joined is None:
            return self.rank == 0 if self._led is None else self._led
        return self._joined.worker.lead == self.rank

    @property
    def lag(self) -> int | None:
        """The lag of the gradient whose outcome became known in the last step; None if none did, or not defined."""
        return self._training.worker.lag.lag

    def __enter__(self) -> Hands:
        if self._is_open or (self._joined is not None and self._joined.has_begun):
            raise Refused("these hands have been in use, but a with block needs new ones: join again")
        self._is_open = True
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> bool:
        self._is_open = False
        if isinstance(error, Stopped):  # which has ended these hands
            return False
        if error is not None and not isinstance(error, _Served):
            self._fail(error)
            return False
        self.end()
        return True

    def end(self) -> None:
        """Complete what is in flight, and load the answer into the model on every rank: the end of the with block.

        Without such a block it is called at the end of the script, unless the script has called it before.
        """
        self._is_open = False
        if self._ended:
            return
        try:
            self._release()
            if self._joined is None:
                self.transport.leave()
            else:
                self._led = self._joined.end()
            self._end_record(self._led)
        except BaseException as failure:
            self._fail(failure)
            raise

    def _release(self) -> None:
        """Leave the user's model and optimizers as they were."""
        self._ended = True
        self._stop_listening()
        for guard in self._guards:
            guard.remove()
        if self._prepared is not None:
            self._prepared.release()

    def _fail(self, error: BaseException) -> None:
        self._release()
        self._end_record(None)
        if self._joined is not None:
            self._joined.fail(error)
        elif isinstance(self.transport, Fails):
            self.transport.fail(error)

    # -- a loop that is left as it is -------------------------------------------------------------

    @overload
    def prepare(self, one: T, /) -> T: ...
    @overload
    def prepare(self, one: T, two: U, /, *others: *Others) -> tuple[T, U, *Others]: ...
    def prepare(self, *objects: Any) -> Any:  # type: ignore[misc]  # mypy: *Any does not accept *Others
        """Put the strategy behind a loop that calls `backward` and `optimizer.step` itself.

        Takes models, optimizers, loaders and schedulers in any order, and returns them in that order; loaders are
        replaced by this worker's part of them, all others are the same objects. A server rank serves here until the
        workers have ended, then leaves the with block, or the script if there is none. For a loop of `step` it takes
        loaders only.
        """
        if objects and all(isinstance(one, DataLoader) for one in objects) and self._joined is not None:
            parts = tuple(map(self._part_of, objects))
            return parts[0] if len(parts) == 1 else parts
        given = LoopObjects.of(objects)
        if self._joined is not None:
            raise Refused("these hands have a model already, but prepare needs hands without one: join(strategy=...)")
        given.refuse_scalers(self._strategy)
        self._is_open = True
        self._prepared = Prepared(self.transport, given.models, given.optimizers, self._strategy, self._seed)
        self._joined = self._prepared.training
        self._begin_record(self._strategy)
        self._loop = given.state(self._strategy)
        self._watch_steps(self._joined)
        dealt = {id(one): self._part_of(one) for one in given.loaders}
        self._prepared.begin(next((one.batch_size or 1 for one in given.loaders), 1))
        if self.role != "worker":
            raise _Served
        found = tuple(dealt.get(id(one), one) for one in objects)
        return found[0] if len(found) == 1 else found

    def _part_of(self, loader: DataLoader[Any]) -> Any:
        """This worker's part of a loader; the workers of one replica draw the same batches."""
        replicas = self._training.replicas
        replica = self.rank * replicas // self.workers
        return self._loop.tracked(part_of(loader, self._seed, replica, replicas, self._strategy.traits.lockstep))

    def accumulate(self) -> AbstractContextManager[None]:
        """Within it, backward passes are not the last of their step."""
        if self._prepared is None:
            raise Refused("accumulate was called before prepare, but is for a loop that was prepared")
        return self._prepared.accumulate()

    # -- a loop of steps --------------------------------------------------------------------------

    def step(self, *fields: Any, **named: Any) -> StepLoss | None:
        """Train on one mini-batch; the newest known loss: a float with `.outputs`, None if none is known yet.

        With a loss, the last field is the target. In lock step every worker must take equally many steps.
        """
        self._refuse_outside("step")
        batch = Fields.of(fields, named)
        if not self._training.has_begun:
            self._training.begin(batch.samples, 0)
        if self.role != "worker":
            raise _Served
        return self._training.step(batch)

    def _refuse_outside(self, name: str) -> None:
        if not self._is_open:
            raise Refused(f"{name} was called outside the with block of its hands, but must be called within")


def join(
    model: nn.Module | Sequence[nn.Module] | str | None = None,
    *,
    strategy: Strategy | str | None = None,
    team: Team | str | None = None,
    loss: Callable[..., Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    example: Sequence[Any] | None = None,
    seed: int | None = None,
    servers: int | None = None,
    folder: str | Path | None = None,
) -> Hands:
    """Become one of the ranks that train `model`, in a process started by `manyhands run`, torchrun or the like.

    A process that was started without a launcher is the only worker.
    When its hands have ended, a script can join again, as for cross validation; all ranks must do so equally often.

    Args:
        model: any module, or a list of pipeline stages. `mh.join("bsp")` is short for
            `mh.join(strategy="bsp")`.
        strategy: the method, such as `mh.ssp(staleness=3)`, or as the command line writes it: "ssp:staleness=3".
            `manyhands run --method` replaces it.
        team: how several ranks form one worker, each with a part of the model: `mh.piped(stages=2)`; the ranks of a
            team get the same mini-batches.
        loss: `loss(model(*fields), target)`; None if the model returns its own loss.
        optimizer: updates the weights instead of the strategy's own rule, with its options as they are at each step.
        example: inputs of the model for a few samples, `(x[:2],)`: a pipeline cuts any module by running it on them.
        seed: determines everything random; 0, unless the launcher chooses another one (`manyhands compare --seeds`).
        servers: how many of the processes are servers, if the launcher does not specify it.
        folder: where the run is saved if it is asked to stop (SIGTERM, SIGUSR1) and never looks at `hands.stopping`.
    """
    from manyhands.runtime.launch.exit_report import report_exit
    from manyhands.runtime.launch.join import connect
    from manyhands.runtime.launch.script_settings import script_settings

    script = report_exit()
    transport = connect(servers=servers)
    try:
        if isinstance(model, str):
            refuse_unless(strategy is None, "strategy", strategy, f"left out beside the method {model!r}")
            model, strategy = None, model
        settings = script_settings()
        chosen = over_team(chosen_strategy(strategy, settings.method, says=transport.rank == 0), team)
        seed = (settings.seed or 0) if seed is None else seed
        observe = line_sender(transport)
        hands = Hands(
            transport,
            model,
            strategy=chosen,
            loss=loss,
            optimizer=optimizer,
            example=example,
            seed=seed,
            observe=observe,
        )
    except BaseException as error:
        transport.fail(error)
        raise
    hands._listen_for_stops(transport.control, None if folder is None else Path(folder))
    script.on_error = lambda error: None if hands._ended else hands._fail(error)
    atexit.unregister(_end_of_script)  # for hands that ended before this process joined again
    atexit.register(_end_of_script, hands, script)
    return hands


def _end_of_script(hands: Hands, script: ScriptEnd) -> None:
    """End hands that were prepared without a with block, unless the script has failed; unused hands are lost."""
    if hands._ended:
        return
    if script.error is not None:
        hands._fail(script.error)
    elif hands._prepared is not None:
        script.conclude(hands.end)
