"""State by name, independent of the number of ranks: what a checkpoint holds of rules, codecs and workers.

    rule/fc.weight/m             a rule's state for a parameter: flat, in the coordinates of the parameter
    rule/fc.weight/Adam.step:    with a colon: not shaped like the parameter, so it is never cut
    rule/fc.weight/:updates      how often the parameter was updated
    worker2/memory/fc.weight     state that only worker 2 has, here the memory of its codec
    round/:column1               state of no parameter, in the column of teams that trains part 1 (core/team.py)

A weight slice may hold any part of a parameter. Its state is therefore saved in slices that say where in the parameter
they start. Joined they are the state of whole parameters, and every other slicing of the model can be cut from that.

This module has the names and the slices; which state a strategy saves it declares with declared_state.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from manyhands.core.errors import Refused, refuse_unless
from manyhands.core.flat import ParamSlot, Span
from manyhands.core.rule import Remembers, Rule, State
from manyhands.core.strategy import Saved, Weights
from manyhands.core.weight_slice import WeightSlice
from manyhands.core.worker import Worker

UPDATES = ":updates"
BUFFER = "buffer"
"""The section of a worker's own buffers, which are in every snapshot."""
OF_WORKER = re.compile(r"worker(\d+)")
"""The section of what one worker has saved."""
COLUMN = re.compile(r"(.*?)/?:column(\d+)")
"""The path of what every column of a grid has saved."""
MEMORIES = ("memory", "owner")
"""Sections with what a codec has not sent yet, as a worker and as the owner of a part of a sum."""


@dataclass(frozen=True)
class Snapshot:
    """A quiesced run: everything that is needed to continue from there."""

    step: int
    weights: Weights
    buffers: Weights
    state: Saved
    positions: Mapping[int, int]
    """How many mini-batches each worker has taken."""


class StateSlice(NamedTuple):
    """A slice of one parameter's state; `start` is counted within the parameter.

    With a `stride` the last two dimensions of `values` are rows, whose starts lie that far apart: a team of slices has
    some columns of a matrix.
    """

    name: str
    start: int
    values: Tensor
    stride: int = 0


# -- rules ---------------------------------------------------------------------------------------------


class _ParamSlice(NamedTuple):
    """The part of one parameter that lies in a weight slice, with the rule's state for it."""

    weight_slice: WeightSlice
    position: int
    parameter: str
    start: int
    weights: Tensor
    state: State


def _param_slices(slices: Iterable[WeightSlice], slots: Iterable[ParamSlot]) -> Iterator[_ParamSlice]:
    by_id = {slot.param_id: slot for slot in slots}
    for weight_slice in slices:
        for index, (param_id, start, weights, state) in enumerate(weight_slice.segments()):
            slot = by_id[param_id]
            start_in_parameter = weight_slice.span.start + start - slot.span.start
            yield _ParamSlice(weight_slice, index, slot.name, start_in_parameter, weights, state)


def state_slices(slices: Iterable[WeightSlice], slots: Iterable[ParamSlot]) -> Iterator[StateSlice]:
    """The rule's state in these weight slices, and how often each parameter was updated."""
    for one in _param_slices(slices, slots):
        for name, value in _remembered(one.weight_slice.rule, one.weights, one.state).items():
            whole = value.shape != one.weights.shape or ":" in name
            ending = ":" if whole and ":" not in name else ""
            yield StateSlice(f"{one.parameter}/{name}{ending}", one.start, value if whole else value.reshape(-1))
        yield StateSlice(f"{one.parameter}/{UPDATES}", one.start, torch.tensor(one.weight_slice.counts[one.position]))


def _remembered(rule: Rule, weights: Tensor, state: State) -> State:
    if isinstance(rule, Remembers):
        return {**state, **rule.memory_of(weights)}
    if "owner" in rule.needs:
        raise Refused(f"{rule} keeps its state to itself, but must be able to hand it over to be saved")
    return state


def join(found: Iterable[StateSlice]) -> Saved:
    """The state of whole parameters from slices; what is never cut is equal in all slices, so the first is taken.

    So is one of several slices with the same start: stages that share a parameter.
    """
    by_name: dict[str, dict[int, StateSlice]] = {}
    for piece in found:
        by_name.setdefault(piece.name, {}).setdefault(piece.start, piece)
    return {
        name: next(iter(pieces.values())).values if is_whole(name) else _joined([pieces[at] for at in sorted(pieces)])
        for name, pieces in by_name.items()
    }


def _joined(pieces: Sequence[StateSlice]) -> Tensor:
    """One state of slices in the order of their starts."""
    if not any(piece.stride for piece in pieces):
        return pieces[0].values if len(pieces) == 1 else torch.cat([piece.values for piece in pieces])
    blocks = [piece.values if piece.stride else piece.values.unsqueeze(-2) for piece in pieces]
    whole = blocks[0].new_empty(*blocks[0].shape[:-2], sum(block.shape[-2] * block.shape[-1] for block in blocks))
    for block, piece in zip(blocks, pieces, strict=True):
        for number, row in enumerate(block.unbind(-2)):
            start = piece.start + number * piece.stride
            whole[..., start : start + row.shape[-1]] = row
    return whole


def is_whole(name: str) -> bool:
    """Whether state of this name is not shaped like a parameter, and so never cut."""
    return ":" in name.rpartition("/")[2]


@torch.no_grad()
def restore(slices: Iterable[WeightSlice], slots: Iterable[ParamSlot], saved: Saved) -> None:
    """Load into these weight slices what belongs to them of a joined state."""
    by_parameter: dict[str, Saved] = {}
    for name, value in saved.items():
        parameter, _, key = name.rpartition("/")
        by_parameter.setdefault(parameter, {})[key] = value
    for one in _param_slices(slices, slots):
        found = by_parameter.get(one.parameter, {})
        one.weight_slice.counts[one.position] = int(found.get(UPDATES, 0))
        _load_rule(one, {name.removesuffix(":"): _cut(name, x, one) for name, x in found.items() if name != UPDATES})


def _cut(name: str, value: Tensor, one: _ParamSlice) -> Tensor:
    return value if is_whole(name) else value[one.start : one.start + one.weights.numel()].view(one.weights.shape)


def _load_rule(one: _ParamSlice, found: State) -> None:
    rule, state = one.weight_slice.rule, one.state
    if isinstance(rule, Remembers):
        rule.remember(one.weights, {name: value for name, value in found.items() if name not in state})
        found = {name: value for name, value in found.items() if name in state}
    if found.keys() != state.keys():
        had, needs = (", ".join(sorted(names)) or "nothing" for names in (found, state))
        raise Refused(f"the rule remembers {had} of {one.parameter} in the checkpoint, but must remember {needs}")
    for name, value in state.items():
        value.copy_(found[name])


# -- vectors, workers ----------------------------------------------------------------------------------


def named(slots: Iterable[ParamSlot], vectors: Sequence[Tensor]) -> Saved:
    """Vectors of the size of the weights (one per dtype group) as views by parameter name."""
    return {slot.name: _view(vectors, slot.span) for slot in slots}


def _view(vectors: Sequence[Tensor], span: Span) -> Tensor:
    return vectors[span.group][..., span.start : span.stop]


@torch.no_grad()
def add(slots: Iterable[ParamSlot], vectors: Sequence[Tensor], saved: Saved) -> None:
    """Add what was saved for some parameters to vectors of the size of the weights."""
    for view, values in _places(slots, vectors, saved):
        view.add_(values)


@torch.no_grad()
def load_vectors(slots: Iterable[ParamSlot], vectors: Sequence[Tensor], saved: Saved) -> None:
    """Copy what was saved for some parameters into vectors of the size of the weights."""
    for view, values in _places(slots, vectors, saved):
        view.copy_(values)


def _places(slots: Iterable[ParamSlot], vectors: Sequence[Tensor], saved: Saved) -> Iterator[tuple[Tensor, Tensor]]:
    """Where in the vectors the saved values of each parameter belong; a codec with another memory has other shapes."""
    for slot in slots:
        if slot.name in saved:
            view, values = _view(vectors, slot.span), saved[slot.name]
            name, bound = f"the shape of what is kept of {slot.name}", f"{tuple(values.shape)}, as in the checkpoint"
            refuse_unless(view.shape == values.shape, name, tuple(view.shape), bound)
            yield view, values


def under(path: str, saved: Mapping[str, Tensor]) -> Saved:
    """The same state with every name prefixed by `path/`."""
    return {f"{path}/{name}": value for name, value in saved.items()}


def section(saved: Saved, path: str) -> Saved:
    """What was saved under `path/`, without that prefix; a value saved as `path` itself has the empty name."""
    found = {name.removeprefix(f"{path}/"): value for name, value in saved.items() if name.startswith(f"{path}/")}
    return {"": saved[path], **found} if path in saved else found


def of_column(saved: Saved, index: int) -> Saved:
    """With what this column has saved of state that belongs to no parameter, or the first one, if this is a new one."""
    plain, columns = dict[str, Tensor](), dict[int, Saved]()
    for name, value in saved.items():
        found = COLUMN.fullmatch(name)
        if found is None:
            plain[name] = value
        else:
            columns.setdefault(int(found[2]), {})[found[1]] = value
    return plain | columns.get(index, columns.get(0, {}))


def refuse_lost(saved: Saved) -> None:
    """Refuse to leave out what was saved, because the run has no place for it. If it is all 0, nothing is lost."""
    names = sorted(name for name, value in saved.items() if bool(value.any()))
    if not names:
        return
    memories = [name for name in names if not {*name.split("/")}.isdisjoint(MEMORIES)]
    what, way_out = ("what a codec has not sent yet", "codec") if memories else ("state without a place here", "knobs")
    names = memories or names
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    raise Refused(
        f"the checkpoint holds {what} ({names[0]}{more}), which would be lost: "
        f"resume with the {way_out} that it was saved with"
    )


def own(w: Worker, saved: Saved) -> Saved:
    """What was saved by the worker or team of this rank; empty for a new one."""
    return section(saved, f"worker{w.replica}")


def workers_in(saved: Saved) -> list[Saved]:
    """What was saved by every worker, in order of rank; empty for a worker that was lost."""
    found = [OF_WORKER.fullmatch(name.partition("/")[0]) for name in saved]
    last = max((int(match[1]) for match in found if match), default=-1)
    return [section(saved, f"worker{rank}") for rank in range(last + 1)]
