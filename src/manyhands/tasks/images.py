"""Handwritten digits as images with one channel, for convolutions: those of the task digits, or of MNIST."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import isqrt
from pathlib import Path
from typing import NamedTuple

from torch import nn
from torch.utils.data import TensorDataset

from manyhands.core.task import Task
from manyhands.tasks.digits import digits
from manyhands.tasks.mnist import mnist

CLASSES = 10


class DigitImages(NamedTuple):
    """A task whose samples are images, and the pixels of a side."""

    base: Task
    side: int

    def task(self, name: str, model: Callable[[], nn.Module], epochs: float) -> Task:
        """The same with another model."""
        return replace(self.base, name=name, model=model, epochs=epochs)


def digit_images(data: Path | None) -> DigitImages:
    """The images of the folder of MNIST, or the bundled ones; no pixel is copied."""
    flat = digits() if data is None else mnist(data)
    side = isqrt(flat.data.tensors[0].shape[1])
    return DigitImages(replace(flat, data=_images(flat.data, side), test=_images(flat.test, side)), side)


def _images(flat: TensorDataset, side: int) -> TensorDataset:
    x, y = flat.tensors
    return TensorDataset(x.view(-1, 1, side, side), y)
