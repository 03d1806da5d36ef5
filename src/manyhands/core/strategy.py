"""Strategy: one way of training, written as the loops of a worker and of a server, with its optional methods."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from torch import Tensor, nn

from manyhands.core.errors import Refused
from manyhands.core.rule import Rule

if TYPE_CHECKING:
    from manyhands.core.budget import Budget
    from manyhands.core.declared_state import StateParts
    from manyhands.core.worker import Worker


Batch = tuple[Tensor, ...]

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Traits:
    """What a strategy, with the knobs it was given, can do and needs: data that runs, documents and tests read."""

    lockstep: bool
    """Whether every worker takes the same number of steps; else workers draw from one common budget of samples."""
    on_worker_loss: Literal["ends", "continues"]
    """What becomes of a run in which a worker is lost that holds no part of the weights alone."""
    one_host: bool = False
    """Whether all ranks must share one host's memory."""
    servers: bool = False
    """Whether it has a program for server ranks (`serve`)."""
    joiners: bool = False
    """Whether a worker may join a run that has begun (`join_running`)."""
    resumable: bool = True
    """Whether a run can be saved and resumed (`declared_state`)."""
    bounded: bool = True
    """Whether fast workers wait for the slowest one sooner or later, so that their lead has a bound."""
    draws_from_all: bool = False
    """Whether every worker may draw any sample, instead of having a shard of the data to itself."""
    peekable: bool = False
    """Whether the weights can be read between two steps without quiescing (`peek`)."""
    may_end_early: bool = False
    """Whether, in lock step, a worker may take fewer steps than the others, which continue without it."""
    averages_gradients: bool = False
    """Whether each update is the mean over all workers of one gradient each, which are to be weighted by samples."""
    equal_replicas: bool = False
    """Whether all workers apply the same mean gradient to the same weights, so that each could do so by itself."""
    keeps_changes: bool = False
    """Whether a change that a user makes to a worker's weights between two steps is in force."""
    plans_ahead: bool = False
    """Whether it must know how many steps the run has."""
    needs_step: str = ""
    """Why a user's loop that calls `backward` itself cannot supply its gradients; empty if it can."""
    needs_whole_model: str = ""
    """Why the parts of a model cannot be trained separately, each by this method; empty if they can."""
    lag: Literal["always 0", "counted", "not defined"] = "not defined"
    """Whether the lag of a gradient (core/lag.py) is 0 by construction, is counted by the strategy in every step, or
    has no meaning."""
    lag_counts: str = ""
    """What the updates are that a lag counts, or why it is always 0 or not defined."""
    streams: bool = False
    """Whether mini-batches of successive steps are in flight together, so the newest known loss is an older one's."""


class Strategy(ABC):
    """One way of training: a dataclass of knobs with the loop of a worker.

    The life of a rank (core/rank.py) is: begin -> step* -> pause (save, evaluate) -> end

        begin    setup, then load declared_state and restored (a resumed run), or join_running (a later worker)
        step     once for each mini-batch
        pause    quiesce, save declared_state and answer, resume; or only peek
        end      finish, answer

    A strategy inherits from this class. What it must have comes first. The optional methods after that do nothing, or
    what their docstring says, unless a strategy overrides them; `OPTIONAL` lists them, and a contract test refuses a
    public method that is in neither list.
    """

    @property
    @abstractmethod
    def traits(self) -> Traits:
        """What it can do with these knobs."""

    @property
    def kind(self) -> str:
        """What a resumed run must have in common with its checkpoint."""
        return type(self).__name__

    @abstractmethod
    def setup(self, w: Worker) -> None:
        """Make this rank's state; all of it is listed here."""

    @abstractmethod
    def step(self, w: Worker, batch: Batch) -> float | None:
        """Consume one mini-batch; return the newest known loss."""

    @abstractmethod
    def answer(self, w: Worker) -> Weights | None:
        """The weights to evaluate and save, on the leading rank; every worker takes part."""

    # -- optional: before a run -------------------------------------------------------------------

    def with_rule(self, change: Callable[[Rule], Rule]) -> Strategy:
        """The same method with another rule, which `change` makes of its own."""
        if not isinstance(self, HasRule):
            raise Refused(f"a {type(self).__name__} has no rule that an optimizer could replace")
        changed: Strategy = replace(self, rule=change(self.rule))  # type: ignore[type-var]
        return changed

    def check(self, workers: int, servers: int, batch_size: int, model: nn.Module) -> None:  # noqa: B027
        """Refuse what cannot work, before anything is started."""

    def remarks(self, steps: int) -> Sequence[str]:
        """Where a run of that many steps will differ from what the knobs say."""
        return ()

    def replicas(self, workers: int) -> int:
        """How many copies of the whole model these workers hold together: one each, unless they divide a model."""
        return workers

    # -- optional: during a run -------------------------------------------------------------------

    def notes(self) -> Mapping[str, Any]:
        """What was decided in the last step, for the record."""
        return {}

    def finish(self, w: Worker) -> None:  # noqa: B027
        """Complete what is in flight between steps, at the end of the run."""

    def programs(self) -> Mapping[str, Callable[[Worker], None]]:
        """The program of each role besides "worker", by role; it returns when the workers have ended."""
        return {"server": self.serve} if self.traits.servers else {}

    def serve(self, w: Worker) -> None:
        """The program of a server rank (traits.servers)."""
        raise NotImplementedError

    def share_budget(self, budget: Budget) -> Budget:
        """What this rank draws mini-batches from: ranks that compute one gradient together draw together."""
        return budget

    def join_running(self, w: Worker) -> None:
        """Continue from where the others are: only the joining worker, after `setup` (traits.joiners)."""
        raise NotImplementedError

    # -- optional: checkpoints and evaluations ----------------------------------------------------

    def quiesce(self, w: Worker) -> None:  # noqa: B027
        """Complete what is in flight, so that no state changes once every worker has returned from here."""

    def resume(self, w: Worker) -> None:  # noqa: B027
        """Begin again after `quiesce`, exactly as a run does that is resumed from a checkpoint."""

    def peek(self, w: Worker) -> Weights:
        """The weights to evaluate; called by one worker while no other is in a step (traits.peekable)."""
        raise NotImplementedError

    def declared_state(self, w: Worker) -> StateParts:
        """By name, all state that `answer` leaves out: core saves it, and loads it in this order (traits.resumable)."""
        return {}

    def restored(self, w: Worker) -> None:  # noqa: B027
        """Continue after the state was loaded, before the first step: every worker of a resumed run."""


OPTIONAL = frozenset(
    {
        *("kind", "with_rule", "check", "remarks", "replicas", "notes", "finish", "programs", "serve"),
        *("share_budget", "join_running"),
        *("quiesce", "resume", "peek", "declared_state", "restored"),
    }
)
"""The methods and properties that only some strategies have; and `rule`, if it moves the weights by one (`HasRule`)."""


@runtime_checkable
class HasRule(Protocol):
    """A strategy that moves the weights by a rule."""

    rule: Rule


Saved = dict[str, Tensor]
"""State by name, in the coordinates of the parameters, so that another number of ranks can continue from it."""
