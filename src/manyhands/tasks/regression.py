"""A smooth function of eight numbers: synthetic, generated quickly, and hard to diverge on.

    y = z / (2 std(z)) + noise,   z = tanh(x A) B,   x, A, B normal

Tanh, eight outputs and targets of half a unit keep the curvature low, so that methods which sum the
updates of several workers train with the same lr as the others.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from manyhands.core.task import Task
from manyhands.tasks.parts import take_no_data

TRAIN, TEST = 2048, 512
INPUTS, HIDDEN, OUTPUTS = 8, 16, 8
NOISE = 0.025


def regression(data: Path | None = None) -> Task:
    """Learn the outputs of a teacher network. The samples are the same for every seed."""
    take_no_data("regression", data)
    x, y = _samples(TRAIN + TEST)
    return Task(
        model=_student,
        data=TensorDataset(x[:TRAIN], y[:TRAIN]),
        test=TensorDataset(x[TRAIN:], y[TRAIN:]),
        loss=mse_loss,
        batch_size=32,
        epochs=40,
        name="regression",
    )


def _samples(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x = normal(count, INPUTS)
    z = torch.tanh(x @ normal(INPUTS, HIDDEN) / INPUTS**0.5) @ normal(HIDDEN, OUTPUTS)
    y = z / (2 * z.std()) + NOISE * normal(count, OUTPUTS)
    return x.float(), y.float()


def _student() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(INPUTS, 64),
        nn.Tanh(),
        nn.Linear(64, 64),
        nn.Tanh(),
        nn.Linear(64, 32),
        nn.Tanh(),
        nn.Linear(32, OUTPUTS),
    )
