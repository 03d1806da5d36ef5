"""Engine: where a run takes place. One protocol for real processes and for virtual time.

    run/ builds a RunSpec  ->  engine.run(spec, observe)  ->  Ran: what the ranks returned

An engine starts one rank for each entry of `spec.roles` (and for each worker that may join later), gives it a transport
and a budget, and runs core/rank.py on it. The `Job` that all ranks share is built by `make_job`, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from manyhands.core.budget import Budget, segments
from manyhands.core.rank import Job, Outcome
from manyhands.core.record import Line
from manyhands.core.strategy import Traits
from manyhands.runtime.resume import saver

if TYPE_CHECKING:
    from manyhands.run.spec import RunSpec

Observe = Callable[[bytes], None]
"""Takes lines of the record, encoded, in the order in which they arrive."""


@dataclass(frozen=True)
class Ran:
    """What a run returned.

    Args:
        outcomes: of the workers that ended; the weights are in that of the lead.
        bytes_sent: bytes of tensors that all ranks sent.
        lost: the ranks that were lost, and why.
        stopped_at: the step at which the run was stopped before its end, if it was.
        interrupted: whether Ctrl-C has stopped it.
    """

    outcomes: Sequence[Outcome]
    bytes_sent: int
    lost: Sequence[tuple[int, str]]
    stopped_at: int | None = None
    interrupted: bool = False


@runtime_checkable
class Engine(Protocol):
    """Carries out a run. Ranks are numbered: workers, then those that may join later, then the other roles."""

    @property
    def world(self) -> str:
        """ "real" or "virtual": the clock by which seconds are measured."""

    @property
    def roles(self) -> Mapping[str, int]:
        """How many ranks of each role a run begins with."""

    @property
    def joiners(self) -> int:
        """How many more workers may join after the beginning."""

    @property
    def fixes_order(self) -> bool:
        """Whether it prescribes the order of the workers' steps, so that the workers cannot pause."""

    def placement(self) -> Sequence[int]:
        """The host of every rank."""

    def fit(self, traits: Traits) -> Engine:
        """This engine, adapted to what a strategy needs; refused if that is impossible."""

    def facts(self) -> Mapping[str, Any]:
        """What the header of a record says about it: world, link and cluster."""

    def run(self, spec: RunSpec, observe: Observe) -> Ran:
        """Carry out the run and wait for its end. Raises whatever ended it early."""


def make_job(spec: RunSpec, budget: Callable[[int], Budget] | None, observe: Callable[[Line], None]) -> Job:
    """What all ranks of the run have in common; `budget` makes one for a number of steps (None: a rank without)."""
    every, evaluate_every = spec.checkpoint_every, spec.evaluate_every
    return Job(
        spec.task,
        spec.strategy,
        [] if budget is None else segments(spec.start, spec.steps, every, budget, evaluate_every),
        spec.batches,
        observe,
        spec.seed,
        spec.steps,
        spec.batch_size,
        save=None if spec.checkpoints is None else saver(spec.checkpoints, spec),
        saves_segments=every is not None,
        resume=spec.resume,
        evaluate=None if evaluate_every is None else spec.evaluate,
    )
