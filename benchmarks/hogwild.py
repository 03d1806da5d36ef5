"""The speed-up of Hogwild! with two processes over one, on the same weights.

mlp-2-over-1       samples per second of two processes over those of one, MLP of 9,600 parameters: every step
                   changes every weight
sparse-2-over-1    the same for sparse logistic regression, the task `sparse`: a million weights, of which a step
                   changes those of its samples' features, in a compiled kernel
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any

import torch
from _models import BATCHES, LEARNING_RATE, own_loop, together
from _ranks import Commands, Side
from _side_by_side import measure, speed
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

import manyhands as mh
from manyhands.report.progress import Progress
from manyhands.tasks.sparse import FEATURES, Logistic, samples

SPARSE_BATCH = 512
"""Samples per step, as for the small MLP."""


def mlp(commands: Commands) -> None:
    """One rank of the MLP."""
    together("shm", mh.hogwild(lr=LEARNING_RATE), "small", commands)


def sparse(commands: Commands) -> None:
    """One rank of the sparse model."""
    data = sparse_batches(int(os.environ["RANK"]))
    own_loop("shm", mh.hogwild(), Logistic(FEATURES), binary_cross_entropy_with_logits, data, commands)


def sparse_batches(rank: int) -> Iterator[tuple[Tensor, ...]]:
    """A rank's own mini-batches without end."""
    fields = samples(BATCHES * SPARSE_BATCH, seed=rank)
    return itertools.cycle(list(zip(*(torch.split(field, SPARSE_BATCH) for field in fields), strict=True)))


def run(progress: Progress) -> list[dict[str, Any]]:
    """Measure all sides. Rounds are printed to stderr, because `progress` counts samples."""
    small = measure("hogwild small", [Side("one", mlp, ranks=1), Side("two", mlp)], steps=300)
    large = measure("hogwild sparse", [Side("one", sparse, ranks=1), Side("two", sparse)], steps=1000)
    return [
        speed("mlp-2-over-1", per_sample(small), small["one"], ">= 1.8"),
        speed("sparse-2-over-1", per_sample(large), large["one"], ">= 1.3"),
    ]


def per_sample(seconds: dict[str, list[float]]) -> list[float]:
    """Two processes take twice as many samples in a step."""
    return [each / 2 for each in seconds["two"]]
