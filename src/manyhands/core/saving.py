"""State by name, whoever holds it: what a checkpoint keeps of rules, codecs and workers.

    rule/fc.weight/m             what a rule remembers of a parameter: flat, in the parameter's own coordinates
    rule/fc.weight/Adam.step:    with a colon: not shaped like the parameter, so it is never cut
    rule/fc.weight/:updates      how often the parameter was updated
    worker2/memory/fc.weight     what worker 2 alone has, here its codec's memory

A shard may hold any stretch of a parameter. So state leaves a holding in pieces that say where in the parameter they
begin; joined they are the whole parameter's, and any other shard can cut its own stretch out of that again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from manyhands.core.errors import Refused
from manyhands.core.flat import Place, Span
from manyhands.core.gather import gather, need_all
from manyhands.core.holding import Holding
from manyhands.core.protocols import Remembers, Rule, Saved, State, Weights
from manyhands.core.worker import Worker

UPDATES = ":updates"


@dataclass(frozen=True)
class Snapshot:
    """A run at rest: all that is needed to go on from there."""

    step: int
    weights: Weights
    buffers: Weights
    state: Saved
    positions: Mapping[int, int]
    """For every worker how many mini-batches it has taken."""


class Piece(NamedTuple):
    """A stretch of what is remembered of one parameter; `start` is counted within the parameter."""

    name: str
    start: int
    values: Tensor


# -- rules ---------------------------------------------------------------------------------------------


class _Stretch(NamedTuple):
    """What a holding has of one parameter."""

    held: Holding
    number: int
    parameter: str
    start: int
    weights: Tensor
    state: State


def _stretches(holdings: Iterable[Holding], places: Iterable[Place]) -> Iterator[_Stretch]:
    by_mark = {place.mark: place for place in places}
    for held in holdings:
        for number, (mark, start, weights, state) in enumerate(held.segments()):
            place = by_mark[mark]
            yield _Stretch(held, number, place.name, held.span.start + start - place.span.start, weights, state)


def pieces(holdings: Iterable[Holding], places: Iterable[Place]) -> Iterator[Piece]:
    """What the rule of these holdings remembers, and how often each parameter was updated."""
    for one in _stretches(holdings, places):
        for name, value in _remembered(one.held.rule, one.weights, one.state).items():
            whole = value.shape != one.weights.shape or ":" in name
            ending = ":" if whole and ":" not in name else ""
            yield Piece(f"{one.parameter}/{name}{ending}", one.start, value if whole else value.reshape(-1))
        yield Piece(f"{one.parameter}/{UPDATES}", one.start, torch.tensor(one.held.counts[one.number]))


def _remembered(rule: Rule, weights: Tensor, state: State) -> State:
    if isinstance(rule, Remembers):
        return {**state, **rule.memory_of(weights)}
    if "owner" in rule.needs:
        raise Refused(f"{rule} keeps its memory to itself, but must be able to hand it over to be saved")
    return state


def join(found: Iterable[Piece]) -> Saved:
    """Whole parameters' state out of pieces; of what is never cut all pieces have the same, and the first is taken."""
    by_name: dict[str, list[Piece]] = {}
    for piece in found:
        by_name.setdefault(piece.name, []).append(piece)
    return {
        name: some[0].values
        if _is_whole(name)
        else torch.cat([p.values for p in sorted(some, key=lambda piece: piece.start)])
        for name, some in by_name.items()
    }


def _is_whole(name: str) -> bool:
    return ":" in name.rpartition("/")[2]


@torch.no_grad()
def restore(holdings: Iterable[Holding], places: Iterable[Place], saved: Saved) -> None:
    """Cut out of a joined state what these holdings need, and let their rule remember it."""
    by_parameter: dict[str, Saved] = {}
    for name, value in saved.items():
        parameter, _, key = name.rpartition("/")
        by_parameter.setdefault(parameter, {})[key] = value
    for one in _stretches(holdings, places):
        found = by_parameter.get(one.parameter, {})
        one.held.counts[one.number] = int(found.get(UPDATES, 0))
        _give_back(one, {name.removesuffix(":"): _cut(name, x, one) for name, x in found.items() if name != UPDATES})


def _cut(name: str, value: Tensor, one: _Stretch) -> Tensor:
    return value if _is_whole(name) else value[one.start : one.start + one.weights.numel()].view(one.weights.shape)


def _give_back(one: _Stretch, found: State) -> None:
    rule, state = one.held.rule, one.state
    if isinstance(rule, Remembers):
        rule.remember(one.weights, {name: value for name, value in found.items() if name not in state})
        found = {name: value for name, value in found.items() if name in state}
    if found.keys() != state.keys():
        had, needs = (", ".join(sorted(names)) or "nothing" for names in (found, state))
        raise Refused(f"the rule remembers {had} of {one.parameter} in what was saved, but must remember {needs}")
    for name, value in state.items():
        value.copy_(found[name])


# -- vectors, workers ----------------------------------------------------------------------------------


def named(places: Iterable[Place], vectors: Sequence[Tensor]) -> Saved:
    """Vectors like the weights (one per part of the model), parameter by parameter."""
    return {place.name: _stretch(vectors, place.span) for place in places}


def _stretch(vectors: Sequence[Tensor], span: Span) -> Tensor:
    return vectors[span.part][..., span.start : span.stop]


@torch.no_grad()
def add(places: Iterable[Place], vectors: Sequence[Tensor], saved: Saved) -> None:
    """Add what was saved of some parameters to vectors like the weights."""
    for place in places:
        if place.name in saved:
            _stretch(vectors, place.span).add_(saved[place.name])


@torch.no_grad()
def place(places: Iterable[Place], vectors: Sequence[Tensor], saved: Saved) -> None:
    """Give vectors like the weights the values that were saved, if any were."""
    for one in places:
        if one.name in saved:
            _stretch(vectors, one.span).copy_(saved[one.name])


def under(path: str, saved: Mapping[str, Tensor]) -> Saved:
    """The same state, one level further down."""
    return {f"{path}/{name}": value for name, value in saved.items()}


def section(saved: Saved, path: str) -> Saved:
    """One level of a state."""
    return {name.removeprefix(f"{path}/"): value for name, value in saved.items() if name.startswith(f"{path}/")}


def collect(w: Worker, mine: Saved, *, of_all: bool = False) -> Saved | None:
    """Every living worker's own state under its name, on the lead; None on the others. `of_all`: none may be lost."""
    gathered = gather(w, tuple(mine), tuple(mine.values()))
    if gathered is None:
        return None
    if of_all:
        need_all(w, gathered)
    return {
        name: value
        for rank, (names, values) in gathered.items()
        for name, value in under(f"worker{rank}", dict(zip(names, values, strict=True))).items()
    }


def own(w: Worker, saved: Saved) -> Saved:
    """What was saved of this worker; nothing if it is new."""
    return section(saved, f"worker{w.rank}")


def inherited(w: Worker, saved: Saved) -> list[Saved]:
    """What was saved of this worker and of those whose work it takes over: of old rank k modulo the new number."""
    return [one for rank, one in enumerate(workers_in(saved)) if rank % len(w.workers) == w.rank]


def workers_in(saved: Saved) -> list[Saved]:
    """What was saved of every worker, in order of rank; nothing of one that was lost."""
    old = {int(name.partition("/")[0].removeprefix("worker")) for name in saved if name.startswith("worker")}
    return [section(saved, f"worker{rank}") for rank in range(max(old, default=-1) + 1)]
