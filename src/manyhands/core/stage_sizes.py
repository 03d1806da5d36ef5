"""Stage sizes: a stage of a model of sizes only. It charges what a stage charges, and returns tensors of equal sizes.

The sizes are found by one pass on the meta device for each size of a micro-batch. The last stage is not run: nothing
but its loss follows.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from manyhands.core.stage import Pass, Stage, Values


class StageSizes(Stage):
    """As `Stage`, without numbers; activations are not measured."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "meter": None})
        self._known: dict[Hashable, Values] = {}

    def _run(self, one: Pass, replays: bool = False) -> Values:
        """Tensors of the sizes of what is computed."""
        key = tuple(None if x is None else (x.shape, x.dtype, x.requires_grad) for x in (*one.inputs, *one.received))
        if one.loss is not None:
            return (torch.empty((), device="meta", requires_grad=True),)
        if key not in self._known:
            with torch.enable_grad():
                out = self._compute(one.inputs, one.received)
            self._known[key] = [_size(x) for x in ((out,) if isinstance(out, Tensor) else out)]
        return self._known[key]

    def _back(self, one: Pass, errors: Values) -> Values:
        return [torch.empty_like(x) if x is not None and x.requires_grad else None for x in one.received]


def _size(x: Tensor | None) -> Tensor | None:
    return None if x is None else torch.empty_like(x, requires_grad=x.requires_grad)
