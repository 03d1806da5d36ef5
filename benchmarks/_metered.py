"""Meters of CPU time, and a rank program that measures what recording costs."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from _models import CASES
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from manyhands import Task
from manyhands.core import rank
from manyhands.core.port import Transport
from manyhands.core.step_timer import StepTimer
from manyhands.engines import local
from manyhands.engines.local import RankProgram


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
        """The same function that makes a context, with entering and leaving the context measured, not its body."""
        return lambda *given: _Ends(self, self.around(makes)(*given))


class _Ends:
    def __init__(self, meter: Meter, inner: AbstractContextManager[None]) -> None:
        self._meter, self._inner = meter, inner

    def __enter__(self) -> None:
        self._meter.around(self._inner.__enter__)()

    def __exit__(self, *error: Any) -> None:
        self._meter.around(self._inner.__exit__)(*error)


class Metered(RankProgram):
    """A rank's part of a run; it returns the CPU seconds that recording cost, and the seconds of the run."""

    def __call__(self, transport: Transport) -> Any:
        """Measure the functions that make, keep and send the lines of steps, in this process only."""
        meter = Meter()
        for home, name in ((StepTimer, "begin"), (rank, "_line"), (local.LineBuffer, "add")):
            setattr(home, name, meter.around(getattr(home, name)))
        for name in ("computing", "encoding"):
            setattr(StepTimer, name, meter.around_ends(getattr(StepTimer, name)))
        began = time.perf_counter()
        super().__call__(transport)
        return meter.seconds, time.perf_counter() - began


def cnn() -> Task:
    """The small convolutional network of other benchmarks, on noise."""
    case = CASES["cnn"]
    numbers = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(512, *case.shape, generator=numbers), torch.randint(10, (512,), generator=numbers))
    return Task(model=case.build, data=data, loss=cross_entropy, batch_size=case.batch_size, name="cnn")
