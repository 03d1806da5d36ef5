"""Weighted averages over all workers.

    x = sum_k a_k x_k / sum_k a_k        a_k: one number, or one for every coordinate

    BySamples      the number of samples seen          n_k
    ByLoss         the smaller the loss, the more      1 / mean loss
    ByFisher       the curvature at each coordinate    sum of g^2, the diagonal of the Fisher matrix
    FixedWeights   as given

A coordinate for which all weights are 0 is averaged evenly: to every weight a number is added that is too small to
matter otherwise. Half-precision numbers are averaged in single precision.

Reference for weights per parameter: J. Hermans, "On scalable deep learning and parallelizing gradient descent", 2017.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from manyhands.core.errors import refuse_unless
from manyhands.core.flat import DtypeGroup
from manyhands.core.port import Collective
from manyhands.core.worker import Worker

TINY = 1e-30
LEAST = 1e-12
"""Smaller losses count as this one."""


class AveragingWeight(Protocol):
    """The weight of this worker in the next average."""

    sums: list[Tensor]
    """What was counted since the last average, for every group of the model; empty at first."""
    by_coordinate: ClassVar[bool]
    """Whether every coordinate has a sum of its own."""

    def see(self, w: Worker, loss: float, samples: int) -> None:
        """Count a step, whose gradient is still in the flat gradient."""

    def take(self, w: Worker) -> list[Tensor]:
        """The weight for every group of the model; starts to count for the next average."""


@dataclass
class _Summed(ABC):
    """A weight made of a sum over steps."""

    sums: list[Tensor] = field(default_factory=list, init=False)
    by_coordinate: ClassVar[bool] = False

    def see(self, w: Worker, loss: float, samples: int) -> None:
        """Add the terms of this step to the sums."""
        groups = [self.of_step(w, group, loss, samples) for group in w.flat.groups]
        self.sums = [w.ops.add(a, b) for a, b in zip(self.sums, groups, strict=True)] if self.sums else groups

    @abstractmethod
    def of_step(self, w: Worker, group: DtypeGroup, loss: float, samples: int) -> Tensor:
        """The term that one step adds."""

    def take(self, w: Worker) -> list[Tensor]:
        """The sums so far; starts new ones."""
        sums, self.sums = self.sums, []
        return sums or [_number(group, 0) for group in w.flat.groups]


class BySamples(_Summed):
    """Weights a worker by the samples that it has seen."""

    def of_step(self, w: Worker, group: DtypeGroup, loss: float, samples: int) -> Tensor:
        return _number(group, samples)


class ByLoss(_Summed):
    """Weights a worker by the inverse of its mean loss."""

    def of_step(self, w: Worker, group: DtypeGroup, loss: float, samples: int) -> Tensor:
        return torch.cat([_number(group, loss), _number(group, 1)])

    def take(self, w: Worker) -> list[Tensor]:
        """The inverse of the mean loss."""
        return [x[1:] / x[:1].clamp_min(LEAST) if x.numel() == 2 else x for x in super().take(w)]


class ByFisher(_Summed):
    """Weights each coordinate by the sum of its squared gradients."""

    by_coordinate = True

    def of_step(self, w: Worker, group: DtypeGroup, loss: float, samples: int) -> Tensor:
        w.ops.computes(group.grad)
        return _precise(group.grad).square()


@dataclass
class FixedWeights:
    """Weights that do not change.

    Args:
        shares: one weight for every worker.
    """

    shares: Sequence[float]
    sums: list[Tensor] = field(default_factory=list, init=False)
    by_coordinate: ClassVar[bool] = False

    def check(self, workers: int) -> None:
        """Refuse shares unless there is one for every worker, and not all are 0."""
        refuse_unless(len(self.shares) == workers, "the number of shares", len(self.shares), f"{workers}, as workers")
        least, total = min(self.shares), sum(self.shares)
        refuse_unless(least >= 0 and total > 0, "shares", tuple(self.shares), ">= 0 and not all 0")

    def see(self, w: Worker, loss: float, samples: int) -> None:
        """Nothing is counted."""

    def take(self, w: Worker) -> list[Tensor]:
        return [_number(group, self.shares[w.workers.index(w.rank)]) for group in w.flat.groups]


def _number(group: DtypeGroup, value: float) -> Tensor:
    return torch.full((1,), value, dtype=_precise(group.weights[:0]).dtype)


def _precise(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


@torch.no_grad()
def average(w: Worker, group: Collective, x: Tensor, weight: Tensor | None = None) -> Tensor:
    """The average of all workers' `x`, which may be overwritten."""
    total = _precise(x)
    if weight is None:
        group.all_reduce(total)
        return w.ops.divide(total, len(w.workers))
    w.ops.add(weight, TINY)
    w.ops.scale(total, weight)
    group.all_reduce(total)
    group.all_reduce(weight)
    return w.ops.divide(total, weight)
