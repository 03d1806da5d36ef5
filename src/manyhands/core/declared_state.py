"""Declared state: a strategy lists what a checkpoint must hold; this module saves it and loads it again.

    def declared_state(self, w):
        slots = w.flat.slots
        return {"rule": RuleState(slots, self.slices), "sum": VectorState(slots, self.sums, "inherited")}

A part's scope says which ranks have it:

    scope        saved by        saved as                loaded by
    shared       the lead        rule/fc.weight/m        every worker: it is equal on all of them
    lead         the lead        rule/fc.weight/m        the lead, which has it for the servers
    divided      every worker    rule/fc.weight/m        every worker: those slices that it holds now
    own          every worker    worker2/x/fc.weight     the worker of the same rank; a new worker starts afresh
    inherited    every worker    worker2/sum/fc.weight   worker (2 mod P), which may get several or none
    all          every worker    worker2/sum/fc.weight   every worker: a list of all workers' states, by rank

All parts together need one gathering, and none if only the lead saves. How names and slices are joined is in state.py.

A run may be resumed with other knobs. State that no part of it takes is refused, unless it is all 0; so a part that
depends on a knob is declared only with that knob, or it is declared and drops what has no effect any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from manyhands.core.flat import ParamSlot
from manyhands.core.gather import gather, need_all
from manyhands.core.state import (
    BUFFER,
    OF_WORKER,
    StateSlice,
    add,
    join,
    load_vectors,
    named,
    of_column,
    refuse_lost,
    restore,
    section,
    state_slices,
    workers_in,
)
from manyhands.core.strategy import Saved, Strategy
from manyhands.core.weight_slice import WeightSlice
from manyhands.core.worker import Worker

Scope = Literal["shared", "lead", "divided", "own", "inherited", "all"]
ON_LEAD = ("shared", "lead")
ONCE_PER_JOB = ("shared", "lead", "divided")


class StatePart(Protocol):
    """One named part of a strategy's state."""

    @property
    def scope(self) -> Scope:
        """Which ranks save and load it."""

    def save(self) -> Iterable[StateSlice]:
        """What this rank has of it; a single value has the empty name."""

    def load(self, saved: Sequence[Saved]) -> None:
        """Continue from what was saved: one state, or as many as the scope selects for this rank."""


StateParts = Mapping[str, StatePart]


@dataclass(frozen=True)
class RuleState:
    """The state of a rule in some weight slices, and how often each parameter was updated."""

    slots: Sequence[ParamSlot]
    slices: Sequence[WeightSlice]
    scope: Scope = "shared"

    def save(self) -> Iterable[StateSlice]:
        return state_slices(self.slices, self.slots)

    def load(self, saved: Sequence[Saved]) -> None:
        for one in saved:
            restore(self.slices, self.slots, one)


@dataclass(frozen=True)
class VectorState:
    """Vectors of the same size as the weights, one per dtype group; inherited ones are added to the worker's own."""

    slots: Sequence[ParamSlot]
    vectors: Sequence[torch.Tensor]
    scope: Scope = "own"

    def save(self) -> Iterable[StateSlice]:
        return _slices(named(self.slots, self.vectors) if self.vectors else {})

    def load(self, saved: Sequence[Saved]) -> None:
        for one in saved:
            (add if self.scope == "inherited" else load_vectors)(self.slots, self.vectors, one)


@dataclass(frozen=True)
class NumberState:
    """An integer attribute of an object, usually of the strategy; inherited ones are added to the worker's own."""

    owner: object
    attribute: str
    scope: Scope = "shared"

    def save(self) -> Iterable[StateSlice]:
        return [StateSlice("", 0, torch.tensor(getattr(self.owner, self.attribute)))]

    def load(self, saved: Sequence[Saved]) -> None:
        before = getattr(self.owner, self.attribute) if self.scope == "inherited" else 0
        numbers = [int(one[""]) for one in saved if one]
        if numbers:
            setattr(self.owner, self.attribute, before + sum(numbers))


@dataclass(frozen=True)
class CustomState:
    """State of any other kind.

    Args:
        scope: which ranks have it.
        read: returns it by name; a single value has the empty name.
        write: takes the saved states that the scope selects for this rank.
    """

    scope: Scope
    read: Callable[[], Saved]
    write: Callable[[Sequence[Saved]], None]

    def save(self) -> Iterable[StateSlice]:
        return _slices(self.read())

    def load(self, saved: Sequence[Saved]) -> None:
        self.write(saved)


@dataclass(frozen=True)
class RemoteState:
    """State that servers hold in slices: the lead reads it from them and returns it to them.

    Args:
        read: returns the slices of all servers.
        write: takes the whole.
        scope: which ranks have it.
    """

    read: Callable[[], Iterable[StateSlice]]
    write: Callable[[Saved], None]
    scope: Scope = "lead"

    def save(self) -> Iterable[StateSlice]:
        return self.read()

    def load(self, saved: Sequence[Saved]) -> None:
        for one in saved:
            self.write(one)


def _slices(saved: Saved) -> list[StateSlice]:
    return [StateSlice(name, 0, values) for name, values in saved.items()]


# -- saving --------------------------------------------------------------------------------------------


def save_state(w: Worker, strategy: Strategy) -> Saved | None:
    """The state of the whole job, on the lead; None on the others. Every worker takes part."""
    parts = strategy.declared_state(w)
    on_lead = {name: part for name, part in parts.items() if part.scope in ON_LEAD}
    collected = {name: part for name, part in parts.items() if part.scope not in ON_LEAD}
    found = _gathered(w, collected, of_all=strategy.traits.on_worker_loss == "ends")
    return None if found is None else join([*found, *_saved(on_lead)])


def _saved(parts: StateParts) -> Iterator[StateSlice]:
    """What this rank has of some parts, each under the part's name."""
    for name, part in parts.items():
        for piece in part.save():
            yield piece._replace(name=f"{name}/{piece.name}" if piece.name else name)


def _gathered(w: Worker, parts: StateParts, *, of_all: bool) -> list[StateSlice] | None:
    """What every worker has of some parts, on the lead; `of_all`: a lost worker is an error."""
    if not parts:
        return [] if w.rank == w.lead else None
    mine = list(_saved(parts))
    gathered = gather(
        w, tuple((name, start, stride) for name, start, _, stride in mine), [piece.values for piece in mine]
    )
    if gathered is None:
        return None
    if of_all:
        need_all(w, gathered)
    return [
        StateSlice(path if _scope(parts, path) == "divided" else f"worker{w.replica_of(rank)}/{path}", start, x, stride)
        for rank, (meta, tensors) in gathered.items()
        for (path, start, stride), x in zip(meta, tensors, strict=True)
    ]


def _scope(parts: StateParts, path: str) -> Scope:
    return parts[path.partition("/")[0]].scope


# -- loading -------------------------------------------------------------------------------------------


def load_state(w: Worker, strategy: Strategy, saved: Saved) -> None:
    """Continue from a saved state, however many workers there are now; every worker calls it after `setup`."""
    saved = of_column(saved, w.rank % w.team_size)
    workers, parts = workers_in(saved), strategy.declared_state(w)
    refuse_lost({name: value for name, value in saved.items() if not _is_taken(parts, name)})
    for name, part in parts.items():
        if part.scope not in ONCE_PER_JOB:
            part.load([section(one, name) for one in _selected(w, part.scope, workers)])
        elif part.scope != "lead" or w.rank == w.lead:
            part.load([section(saved, name)])
    strategy.restored(w)


def _is_taken(parts: StateParts, path: str) -> bool:
    """Whether a part takes what was saved under this path; a snapshot loads buffers itself."""
    worker, _, rest = path.partition("/")
    by_worker = OF_WORKER.fullmatch(worker) is not None
    name = (rest if by_worker else path).partition("/")[0]
    if name not in parts:
        return by_worker and name == BUFFER
    return by_worker != (parts[name].scope in ONCE_PER_JOB)


def _selected(w: Worker, scope: Scope, workers: Sequence[Saved]) -> Sequence[Saved]:
    """The states of old workers that this worker loads; a worker that was lost has left none."""
    if scope == "all":
        return workers
    if scope == "own":
        return [one for one in workers[w.replica : w.replica + 1] if one]
    return [one for one in workers[w.replica :: len(w.workers) // w.team_size] if one]
