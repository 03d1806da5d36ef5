"""Averages over all workers, in which every worker counts as much as its weight says.

    x = sum_k a_k x_k / sum_k a_k        a_k: one number, or one for every coordinate

    BySamples   how many samples it has seen           n_k
    ByLoss      how small its loss was                 1 / mean loss
    ByFisher    how sure it is of each coordinate      sum of g^2, the diagonal of the Fisher matrix
    Fixed       as given

What nobody has a weight for is averaged evenly: to every weight a number is added that is too small to matter
otherwise. Half-precision numbers are averaged as single ones.

Reference for weights per parameter: J. Hermans, "On scalable deep learning and parallelizing gradient descent", 2017.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from manyhands.core.errors import refuse_unless
from manyhands.core.flat import Part
from manyhands.core.protocols import Collective
from manyhands.core.worker import Worker

TINY = 1e-30
LEAST = 1e-12
"""No loss counts as less."""


class Weight(Protocol):
    """How much this worker counts in the next average."""

    sums: list[Tensor]
    """What it has seen since the last one, for every part of the model; nothing at first."""

    def see(self, w: Worker, loss: float, samples: int) -> None:
        """A step was taken; its gradient is in the flat gradient still."""

    def take(self, w: Worker) -> list[Tensor]:
        """The weight for every part of the model; from now on the next average counts."""


@dataclass
class _Summed(ABC):
    """A weight made of a sum over steps."""

    sums: list[Tensor] = field(default_factory=list, init=False)

    def see(self, w: Worker, loss: float, samples: int) -> None:
        """Add this step."""
        parts = [self.of_step(part, loss, samples) for part in w.flat.parts]
        self.sums = [a + b for a, b in zip(self.sums, parts, strict=True)] if self.sums else parts

    @abstractmethod
    def of_step(self, part: Part, loss: float, samples: int) -> Tensor:
        """What one step adds."""

    def take(self, w: Worker) -> list[Tensor]:
        """Begin a new sum."""
        sums, self.sums = self.sums, []
        return sums or [_number(part, 0) for part in w.flat.parts]


class BySamples(_Summed):
    """How many samples a worker has seen."""

    def of_step(self, part: Part, loss: float, samples: int) -> Tensor:
        return _number(part, samples)


class ByLoss(_Summed):
    """How small its loss was."""

    def of_step(self, part: Part, loss: float, samples: int) -> Tensor:
        return torch.cat([_number(part, loss), _number(part, 1)])

    def take(self, w: Worker) -> list[Tensor]:
        """The inverse of the mean loss."""
        return [x[1:] / x[:1].clamp_min(LEAST) if x.numel() == 2 else x for x in super().take(w)]


class ByFisher(_Summed):
    """How sure it is of each coordinate."""

    def of_step(self, part: Part, loss: float, samples: int) -> Tensor:
        return _precise(part.grad).square()


@dataclass
class Fixed:
    """As given.

    Args:
        shares: one for every worker.
    """

    shares: Sequence[float]
    sums: list[Tensor] = field(default_factory=list, init=False)

    def check(self, workers: int) -> None:
        """One for every worker, and not all zero."""
        refuse_unless(len(self.shares) == workers, "the number of shares", len(self.shares), f"{workers}, as workers")
        least, total = min(self.shares), sum(self.shares)
        refuse_unless(least >= 0 and total > 0, "shares", tuple(self.shares), ">= 0 and not all 0")

    def see(self, w: Worker, loss: float, samples: int) -> None:
        """They do not change."""

    def take(self, w: Worker) -> list[Tensor]:
        return [_number(part, self.shares[w.workers.index(w.rank)]) for part in w.flat.parts]


def _number(part: Part, value: float) -> Tensor:
    return torch.full((1,), value, dtype=_precise(part.weights[:0]).dtype)


def _precise(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


@torch.no_grad()
def average(everyone: Collective, workers: int, x: Tensor, weight: Tensor | None = None) -> Tensor:
    """The average of every worker's `x`, which may be overwritten."""
    total = _precise(x)
    if weight is None:
        everyone.all_reduce(total)
        return total if total.is_meta else total.div_(workers)
    weight = weight + TINY
    if not total.is_meta:
        total.mul_(weight)
    everyone.all_reduce(total)
    everyone.all_reduce(weight)
    return total if total.is_meta else total.div_(weight)
