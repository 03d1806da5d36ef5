"""Tasks that several pins share."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import manyhands as mh
from manyhands import tasks

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def digits64():
    """digits in double precision."""
    digits = tasks.load("digits")
    x, y = digits.data.tensors

    def model():
        return digits.model().double()

    return mh.Task(model, TensorDataset(x.double(), y), nn.functional.cross_entropy, batch_size=32, name="digits64")


@pytest.fixture
def plain_sgd():
    """Train a task in plain torch on given mini-batches: the reference of all one-worker identities."""

    def train(task, batches, lr, seed=0):
        model = task.build(seed)
        for batch in batches:
            model.zero_grad()
            task.loss_of(model, batch).backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= lr * p.grad
        return dict(model.named_parameters())

    return train
