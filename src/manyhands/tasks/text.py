"""The next character of a text, from the 16 before it, for any text file."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from manyhands.core.errors import Refused, refuse_unless
from manyhands.core.task import Task
from manyhands.tasks.parts import accuracy

CONTEXT = 16
SHORTEST = 10 * (CONTEXT + 1)
"""The last tenth must hold one context and its next character."""
SAMPLES = 128_000
"""Samples of a default run, for a text of any length: 1,000 steps of 128."""


def text(data: Path | None = None) -> Task:
    """Predict the next character. The loss is in nats; the last tenth of the text is for the test.

    Args:
        data: a text file in UTF-8, or a folder with exactly one `.txt` file.
    """
    return next_character(data, _model, "text")


def next_character(data: Path | None, model: Callable[[int], nn.Module], name: str) -> Task:
    """The task for any model; `model` takes the number of distinct characters."""
    path = _file(data, name)
    try:
        characters = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise Refused(f"{path} is not a text in UTF-8: {error}") from None
    refuse_unless(len(characters) >= SHORTEST, f"the number of characters in {path}", len(characters), f">= {SHORTEST}")
    points = np.frombuffer(characters.encode("utf-32-le"), dtype="<u4")
    vocabulary, codes = np.unique(points, return_inverse=True)
    tokens = torch.from_numpy(codes.astype(np.int64))
    cut = len(tokens) - len(tokens) // 10
    train = _windows(tokens[:cut])
    return Task(
        model=partial(model, len(vocabulary)),
        data=train,
        test=_windows(tokens[cut:]),
        loss=cross_entropy,
        metric=accuracy,
        batch_size=32,
        epochs=SAMPLES / len(train),
        name=name,
    )


def _model(vocabulary: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Embedding(vocabulary, 32),
        nn.Flatten(),
        nn.Linear(32 * CONTEXT, 128),
        nn.ReLU(),
        nn.Linear(128, 128),
        nn.ReLU(),
        nn.Linear(128, vocabulary),
    )


def _windows(tokens: Tensor) -> TensorDataset:
    """Every context and the character after it; the contexts overlap in memory, so nothing is copied."""
    return TensorDataset(tokens[:-1].unfold(0, CONTEXT, 1), tokens[CONTEXT:])


def _file(data: Path | None, name: str) -> Path:
    if data is None:
        raise Refused(f"the task {name} needs --data FILE, or a folder with exactly one .txt file")
    if not data.is_dir():
        if not data.is_file():
            raise Refused(f"there is no file {data}")
        return data
    found = sorted(data.glob("*.txt"))
    refuse_unless(len(found) == 1, f"the number of .txt files in {data}", len(found), "1 (or name the file itself)")
    return found[0]
