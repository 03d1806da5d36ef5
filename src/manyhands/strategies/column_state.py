"""Column state: what a method saves when it trains one part of a model, as a part of the state of the whole.

A column of a grid (strategies/grid.py) saves by parameter name what belongs to its parameters. Of slices of parameters
it saves where they lie in the whole ones, so that other teams, or none, can continue from it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from manyhands.core.declared_state import ON_LEAD, Scope, StatePart
from manyhands.core.param_cut import ParamCut
from manyhands.core.state import StateSlice, is_whole
from manyhands.core.strategy import Saved
from manyhands.core.worker import Worker


@dataclass(frozen=True)
class ColumnState:
    """A part of the state in one column.

    Args:
        part: that of the method. What is equal on all workers, or what the lead has, the lead of every column saves.
        me: the worker of the column.
        index: the number of the column.
        own: the parameters that the column trains.
        others: those that other columns train; of a saved whole their state is left out.
        sliced: how those are cut of which the column has slices, and their shapes. What is saved is in the coordinates
            of whole parameters.
    """

    part: StatePart
    me: Worker
    index: int
    own: Collection[str]
    others: Collection[str]
    sliced: Mapping[str, tuple[ParamCut, torch.Size]]

    @property
    def scope(self) -> Scope:
        return "divided" if self.part.scope in ON_LEAD else self.part.scope

    def save(self) -> Iterator[StateSlice]:
        """By parameter name; what belongs to no parameter under the name of the column."""
        if self.part.scope in ON_LEAD and self.me.rank != self.me.lead:
            return
        for piece in self.part.save():
            is_own = any(word in self.own for word in piece.name.split("/"))
            if not is_own:
                piece = piece._replace(name=f"{piece.name}/:column{self.index}".lstrip("/"))
            yield from self._of_whole(piece)

    def _of_whole(self, piece: StateSlice) -> Iterator[StateSlice]:
        """A slice of the state of a slice of a parameter, as slices of the state of the whole."""
        found = self._cut_of(piece.name)
        if found is None:
            yield piece
            return
        cut, shape = found
        for start, stride, values in cut.runs(shape, self.index, piece.start, piece.values):
            yield StateSlice(piece.name, start, values.contiguous(), stride)

    def _cut_of(self, name: str) -> tuple[ParamCut, torch.Size] | None:
        """How the parameter of this state is cut, unless all slices have the same."""
        if is_whole(name):
            return None
        return next((self.sliced[word] for word in name.split("/") if word in self.sliced), None)

    def load(self, saved: Sequence[Saved]) -> None:
        if self.part.scope != "lead" or self.me.rank == self.me.lead:
            self.part.load([self._mine(one) for one in saved])

    def _mine(self, saved: Saved) -> Saved:
        """Without the state of parameters that only other columns train."""
        words = {name: name.split("/") for name in saved}
        foreign = {
            name
            for name, path in words.items()
            if any(word in self.others for word in path) and not any(word in self.own for word in path)
        }
        return {name: self._slice(name, value) for name, value in saved.items() if name not in foreign}

    def _slice(self, name: str, value: Tensor) -> Tensor:
        """Of the state of a whole parameter that of the column's slice."""
        found = self._cut_of(name)
        if found is None or value.shape[-1:] != (found[1].numel(),):
            return value
        cut, shape = found
        rows = value.reshape(-1, *shape)
        taken = torch.stack([cut.take(row, self.index).reshape(-1) for row in rows])
        return taken.view(*value.shape[:-1], -1)
