"""Handwritten digits of 8 x 8 pixels: bundled, small, and learned in seconds.

Data: Optical Recognition of Handwritten Digits, E. Alpaydin and C. Kaynak, UCI Machine Learning Repository,
1998, https://doi.org/10.24432/C50P49, CC BY 4.0. See DATA.md beside this file.
"""

from __future__ import annotations

import gzip
from functools import partial
from importlib import resources
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from manyhands.core.task import Task
from manyhands.tasks.parts import accuracy, mlp, take_no_data

TRAIN = 1437
"""Training samples, of 1,797; the other 360 are for the test."""


def digits(data: Path | None = None) -> Task:
    """Classify digits. The split into training and test data is the same for every seed."""
    take_no_data("digits", data)
    packed = resources.files("manyhands.tasks").joinpath("digits.csv.gz").read_bytes()
    table = np.loadtxt(gzip.decompress(packed).decode("ascii").splitlines(), dtype=np.uint8, delimiter=",")
    order = torch.randperm(len(table), generator=torch.Generator().manual_seed(0))
    rows = torch.from_numpy(table)[order]
    x, y = rows[:, :-1].float() / 16, rows[:, -1].long()
    return Task(
        model=partial(mlp, 64, 128, 128, 64, 10),
        data=TensorDataset(x[:TRAIN], y[:TRAIN]),
        test=TensorDataset(x[TRAIN:], y[TRAIN:]),
        loss=cross_entropy,
        metric=accuracy,
        batch_size=32,
        epochs=40,
        name="digits",
    )
