"""LoaderPosition: where a worker is in a loader, so that a resumed loop continues there with the same batches.

    pass 3      b0 b1 b2 b3 | b4 b5 ...        2 workers, saved when each has taken 2: pass 3, base 0, taken 2
                                               resumed by 3 workers:                   pass 3, base 4, taken 0

Batches are counted where the user's loop takes them: a loader with processes of its own has prefetched more. To
continue, the sampler is begun again in the random state in which its pass began, and the batches before the position
are drawn from the sampler only: no data is loaded for them. Then the random state is again what it was.

A pass that the loop has left early (`break`) is over, unless the run is being stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from manyhands.core.strategy import Saved
from manyhands.run.random_state import random_state, restore_random

Facts = dict[str, Any]
END = object()
"""Comes after the last batch."""


class LoaderPosition:
    """The position of one worker in one loader.

    Args:
        parts: how many workers there are.
        sizes: the number of batches in a pass of all workers and the samples in a batch, if they are known.
        generators: those that the loader and its samplers draw with.
    """

    def __init__(self, parts: int, sizes: tuple[int | None, int | None], generators: Sequence[torch.Generator]) -> None:
        self.passes = 0
        """How many passes have begun."""
        self.before_batch: Callable[[], None] = lambda: None
        """Called when the loop asks for a batch."""
        self.keeps_open: Callable[[], bool] = lambda: False
        """Whether a pass that the loop leaves is interrupted, instead of over."""
        self._parts, self._sizes, self._generators = parts, sizes, generators
        self._base = self._taken = 0
        self._is_over = True
        self._began: Saved = {}
        self._resumed: Mapping[str, Tensor] = {}

    # -- in a pass --------------------------------------------------------------------------------

    def begin(self) -> int:
        """A pass begins, or the one that was saved is continued; its number."""
        self._after = random_state()
        if self._resumed:
            restore_random(self._resumed)
            for number, generator in enumerate(self._generators):
                generator.set_state(self._resumed[f"generator{number}"])
        else:
            self._base = self._taken = 0
            self._is_over = False
            self.passes += 1
        self._began = random_state()
        self._began |= {f"generator{number}": one.get_state() for number, one in enumerate(self._generators)}
        return self.passes - 1

    def skip(self, batches: Iterator[Any]) -> list[Any]:
        """Draw the batches before the position; the first ones of them, at most one for each worker."""
        if not self._resumed:
            return []
        left_out = self._base + self._taken * self._parts
        first = list(islice(batches, min(left_out, self._parts)))
        rest = left_out - len(first)
        next(islice(batches, rest, rest), None)
        self._resumed = {}
        restore_random(self._after)
        return first

    def counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The same batches; each one counts when the loop takes it."""
        number = self.passes
        try:
            while (batch := self._next(batches)) is not END:
                self._taken += 1
                yield batch
            self._is_over = True
        finally:
            if number == self.passes and not self.keeps_open():
                self._is_over = True

    def _next(self, batches: Iterator[Any]) -> Any:
        self.before_batch()
        return next(batches, END)

    # -- in a checkpoint --------------------------------------------------------------------------

    def facts(self) -> Facts:
        """Where this worker is: in the middle of a pass (`taken` is a number), or between two."""
        count, size = self._sizes
        taken = None if self._is_over else self._taken
        return {"passes": self.passes, "base": self._base, "taken": taken, "batches": count, "batch_size": size}

    def began(self) -> Saved:
        """The random state in which the pass began; empty between two passes."""
        return {} if self._is_over else self._began

    def continue_from(self, facts: Sequence[Facts], index: int, began: Mapping[str, Tensor]) -> None:
        """Continue where worker `index` of a checkpoint with these positions was, or all of them together."""
        same = len(facts) == self._parts and facts[0]["batch_size"] == self._sizes[1]
        at = facts[index] if same else together(facts, self._sizes[1])
        self.passes, self._base, self._taken = at["passes"], at["base"], at["taken"] or 0
        self._is_over = at["taken"] is None
        self._resumed = {} if self._is_over else began


def together(facts: Sequence[Facts], batch_size: int | None) -> Facts:
    """One position for all workers: as many samples of a pass as they have taken together."""
    first = facts[0]
    if all(one["passes"] == first["passes"] for one in facts):
        passes, total = first["passes"], first["base"] + sum(one["taken"] or 0 for one in facts)
        if all(one["taken"] is None for one in facts):
            return {**first, "base": 0}
    elif first["batches"] is None:
        return {**first, "passes": max(one["passes"] for one in facts), "base": 0, "taken": None}
    else:
        whole = sum(one["passes"] - (one["taken"] is not None) for one in facts) * first["batches"] // len(facts)
        passes, total = divmod(whole + sum(one["taken"] or 0 for one in facts), first["batches"])
        passes += 1
    if batch_size and first["batch_size"]:
        total = total * first["batch_size"] // batch_size
    return {**first, "passes": passes, "base": total, "taken": 0}


class PositionedLoader(DataLoader[Any]):
    """A DataLoader that knows how many batches of a pass have been taken."""

    position: LoaderPosition

    def __iter__(self) -> Any:
        return self.position.counted(super().__iter__())
