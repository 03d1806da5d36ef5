"""Parameter cut: how the members of a team divide one parameter among them.

                       dim 0: rows of W                      dim 1: columns of W
    W (4 x 6)          member 0: 0..1   member 1: 2..3       member 0: 0..2   member 1: 3..5

A member may have several ranges: of a fused projection (Q, K and V in one matrix) those of its heads in each. Answers
and checkpoints have whole parameters, so that they do not depend on how many ranks there were.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.core.work import ModelWork, Work, owner

Ranges = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class ParamCut:
    """A dimension, and by index in the team the ranges of it that a member has; members that are left out have none."""

    dim: int
    ranges: Mapping[int, Ranges]

    def take(self, whole: Tensor, index: int) -> Tensor:
        """The slice of a member, as new memory; dimensions before those of the parameter are kept whole."""
        pieces = [whole.narrow(self.dim, start, stop - start) for start, stop in self.ranges[index]]
        return torch.cat(pieces, self.dim).contiguous()

    def put(self, whole: Tensor, index: int, piece: Tensor) -> None:
        """Write the slice of a member into the whole."""
        start = 0
        for first, last in self.ranges[index]:
            whole.narrow(self.dim, first, last - first).copy_(piece.narrow(self.dim, start, last - first))
            start += last - first

    def shifted(self, by: int) -> ParamCut:
        """The same cut among members whose indices are larger by a number."""
        return ParamCut(self.dim, {index + by: some for index, some in self.ranges.items()})

    def width(self, index: int) -> int:
        return sum(stop - start for start, stop in self.ranges[index])

    def runs(self, shape: torch.Size, index: int, start: int, values: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        """Where elements from `start` on of a member's flat slice lie in the flat whole, of this shape.

        Yields the position of the first row, the distance of rows, and the rows: values whose last two dimensions are
        the number of rows and their length.
        """
        inner = math.prod(shape[self.dim + 1 :])
        row, done = self.width(index) * inner, 0
        length = values.shape[-1]
        while done < length:
            number, within = divmod(start + done, row)
            rows = (length - done) // row if within == 0 else 0
            taken = rows * row if rows else min(row - within, length - done)
            block = values[..., done : done + taken]
            block = block.reshape(*block.shape[:-1], max(rows, 1), -1)
            for position, piece in self._pieces(index, inner, within, block):
                yield number * shape[self.dim] * inner + position, shape[self.dim] * inner, piece
            done += taken

    def _pieces(self, index: int, inner: int, within: int, block: Tensor) -> Iterator[tuple[int, Tensor]]:
        """What of some rows, from element `within` on, lies in each range, and where that begins in a whole row."""
        ranges = self.ranges[index]
        begins = accumulate((stop - start for start, stop in ranges), initial=0)
        for (start, stop), begin in zip(ranges, begins, strict=False):
            low = max(within, begin * inner)
            high = min(within + block.shape[-1], (begin + stop - start) * inner)
            if low < high:
                yield start * inner + low - begin * inner, block[..., low - within : high - within]


ParamCuts = Mapping[str, ParamCut]
"""By the names of the parameters that are cut."""


@torch.no_grad()
def keep_slices(model: nn.Module, cuts: ParamCuts, index: int) -> None:
    """Replace each parameter that is cut by the slice of a member; the objects stay, and so does the module."""
    for name, p in model.named_parameters():
        if name in cuts and index in cuts[name].ranges:
            p.data = cuts[name].take(p.data, index)


def sliced_copy(model: nn.Module, part: nn.Module, cuts: ParamCuts, index: int) -> tuple[nn.Module, nn.Module]:
    """Copies of a model and of what a member trains of it, with its slices; what is cut is never copied whole."""
    copies: dict[int, Any] = {
        id(p): nn.Parameter(cuts[name].take(p.detach(), index), p.requires_grad)
        for name, p in model.named_parameters()
        if name in cuts and index in cuts[name].ranges
    }
    copied = copy.deepcopy(model, copies)
    trained = nn.Module()
    for number, p in enumerate(part.parameters()):
        trained.register_parameter(f"p{number}", copies[id(p)])
    return copied, trained


def sliced_work(work: ModelWork, model: nn.Module, cuts: ParamCuts, index: int) -> ModelWork:
    """The work of a member: of a module whose parameters are cut the share that its slices have of them."""
    whole: dict[str, int] = {}
    own: dict[str, int] = {}
    for name, p in model.named_parameters():
        cut = cuts.get(name)
        if cut is not None and index in cut.ranges:
            whole[owner(name)] = whole.get(owner(name), 0) + p.numel()
            own[owner(name)] = own.get(owner(name), 0) + p.numel() // p.shape[cut.dim] * cut.width(index)
    found = {name: work.of(name) for name in work.modules}
    return ModelWork({name: _times(one, own.get(name, 1) / whole.get(name, 1)) for name, one in found.items()})


def _times(work: Work, share: float) -> Work:
    return work / (1 / share) if share else Work()
