"""Meters of CPU time, and a rank that measures what its record costs it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from _models import CASES
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from manyhands import Task, processes
from manyhands.core import loop
from manyhands.core.protocols import Transport
from manyhands.core.spent import Spent
from manyhands.processes import Part


class Meter:
    """CPU seconds of this thread inside some functions."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, measured."""

        def measured(*given: Any, **named: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*given, **named)
            finally:
                self.seconds += time.thread_time() - began

        return measured

    def around_ends(self, makes: Callable[..., AbstractContextManager[None]]) -> Callable[..., Any]:
        """What makes a context, of which only entering and leaving are measured."""
        return lambda *given: _Ends(self, self.around(makes)(*given))


class _Ends:
    def __init__(self, meter: Meter, inner: AbstractContextManager[None]) -> None:
        self._meter, self._inner = meter, inner

    def __enter__(self) -> None:
        self._meter.around(self._inner.__enter__)()

    def __exit__(self, *error: Any) -> None:
        self._meter.around(self._inner.__exit__)(*error)


class Metered(Part):
    """A rank's part of a plan that hands back what recording has cost it."""

    def __call__(self, transport: Transport) -> Any:
        """Measure whatever keeps or sends a step's facts, in this process alone."""
        meter = Meter()
        for home, name in ((Spent, "begin"), (loop, "_line"), (processes.Lines, "add")):
            setattr(home, name, meter.around(getattr(home, name)))
        for name in ("computing", "encoding"):
            setattr(Spent, name, meter.around_ends(getattr(Spent, name)))
        began = time.perf_counter()
        super().__call__(transport)
        return meter.seconds, time.perf_counter() - began


def cnn() -> Task:
    """The small convolutional network of other benchmarks, on noise."""
    case = CASES["cnn"]
    numbers = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(512, *case.shape, generator=numbers), torch.randint(10, (512,), generator=numbers))
    return Task(model=case.build, data=data, loss=cross_entropy, batch_size=case.batch_size, name="cnn")
