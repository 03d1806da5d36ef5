"""What all workers of a user's loop do together between two steps: reduce a metric, wait, look at the answer.

All workers call these equally often, in lock step after the same step; otherwise the run fails with the reason. Before
training begins, server ranks take part, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeVar, overload

import torch
from torch import Tensor, nn

from manyhands.core.all_values import Value, all_values
from manyhands.core.answer_block import answer_block
from manyhands.core.errors import Refused, unknown
from manyhands.core.port import Transport
from manyhands.run.training import Training

Reduction = Literal["mean", "sum", "min", "max"]
REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda rows: rows.mean(0),
    "sum": lambda rows: rows.sum(0),
    "min": lambda rows: rows.amin(0),
    "max": lambda rows: rows.amax(0),
}
T = TypeVar("T")


class LoopCollectives:
    """A part of `Hands`: the calls that all workers make together."""

    transport: Transport
    _joined: Training | None = None
    _calls = 0

    @property
    def lead(self) -> bool:
        """Whether this is the rank that evaluates and saves."""
        raise NotImplementedError

    def _start_prepared(self) -> None:
        """Begin to train, if the loop was prepared and has not taken a step."""

    def _values(self, name: str, value: Value) -> dict[int, Value]:
        """The values of all workers; `name` is the function that was called."""
        self._start_prepared()
        t = self.transport
        ranks: Sequence[int] = range(len(t.roles))
        if self._joined is not None and self._joined.has_begun:
            ranks = self._joined.worker.members
            self._joined.position.at_call(name)
        self._calls += 1
        with torch.no_grad():
            found = all_values(t, ranks, self._calls, value)
        return {rank: one for rank, one in found.items() if t.roles[rank] == "worker"}

    @overload
    def reduce(self, value: float, how: Reduction = "mean") -> float: ...
    @overload
    def reduce(self, value: Tensor, how: Reduction = "mean") -> Tensor: ...
    def reduce(self, value: float | Tensor, how: Reduction = "mean") -> float | Tensor:
        """The mean, sum, minimum or maximum of all workers' values: the same number on every rank.

        A number gives a number, a tensor a tensor of the same shape. A team of ranks is one worker: the value of its
        first member counts.
        """
        if how not in REDUCTIONS:
            raise unknown("reduction", how, list(REDUCTIONS))
        if not isinstance(value, int | float | Tensor):
            raise Refused(f"the value to reduce is a {type(value).__name__}, but must be a number or a tensor")
        values = self._values("reduce", value.detach() if isinstance(value, Tensor) else float(value))
        size = 1 if self._joined is None else self._joined.worker.team_size
        found = [one for rank, one in values.items() if rank % size == 0]
        if not isinstance(value, Tensor):
            return float(REDUCTIONS[how](torch.tensor(found, dtype=torch.float64)))
        if odd := [one for one in found if not isinstance(one, Tensor) or one.shape != value.shape]:
            shape = tuple(odd[0].shape) if isinstance(odd[0], Tensor) else "a number"
            raise Refused(f"the value to reduce has shape {tuple(value.shape)}, but on another rank it is {shape}")
        rows = torch.stack([one.to(value.device) for one in found if isinstance(one, Tensor)])
        return REDUCTIONS[how](rows if rows.is_floating_point() or how != "mean" else rows.float())

    def gather(self, value: Any) -> list[Any]:
        """The values of all workers, in the order of ranks, on every rank: numbers, strings or tensors."""
        if not isinstance(value, int | float | str | Tensor | None):
            raise Refused(f"the value to gather is a {type(value).__name__}, but must be a number, string or tensor")
        return list(self._values("gather", value.detach() if isinstance(value, Tensor) else value).values())

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self._values("barrier", None)

    def print(self, *values: Any, **settings: Any) -> None:
        """Print on the lead only."""
        if self.lead:
            print(*values, **{"flush": True, **settings})

    @contextmanager
    def answer(self) -> Iterator[nn.Module]:
        """Within it, the model holds the method's answer on every rank: the centre, the mean, all stages.

        It is for evaluating and saving; then training continues as if nothing had happened. Several prepared models
        hold it together, and a `ModuleList` of them is returned.
        """
        self._start_prepared()
        training = self._joined
        if training is None or not training.has_begun:
            raise Refused("answer was called before the first step, but there is none yet: the model is the answer")
        if not training.strategy.traits.equal_replicas:  # else nothing is in flight before the gradient is complete
            training.refuse_within_step("answer")
        training.position.at_call("answer")
        training.shows_answer = True
        try:
            with answer_block(training.run) as model:
                yield model
        finally:
            training.shows_answer = False
            training.changes.note()

    def evaluate(self, function: Callable[[nn.Module], T]) -> T:
        """What `function(model)` returns with the method's answer, on every rank; without gradients, in eval mode."""
        with self.answer() as model, torch.no_grad():
            modes = {one: one.training for one in model.modules()}
            model.eval()
            try:
                return function(model)
            finally:
                for module, mode in modes.items():
                    module.training = mode
