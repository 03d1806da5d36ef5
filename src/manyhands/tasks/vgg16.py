"""VGG-16 on ImageNet-1K: sizes only, for virtual time. Nothing is downloaded, nothing is computed.

Reference: K. Simonyan, A. Zisserman, Very Deep Convolutional Networks for Large-Scale Image Recognition, 2015,
https://arxiv.org/abs/1409.1556, configuration D.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from manyhands.core.errors import Refused
from manyhands.core.task import Task
from manyhands.tasks.parts import take_no_data

BLOCKS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
"""Channels of the 3 x 3 convolutions; each block ends with pooling that halves the sides."""
SIDE = 224
CLASSES = 1000
SAMPLES = 1_281_167


def vgg16(data: Path | None = None) -> Task:
    """The sizes of the model and of its data set; `work` counts 6 operations per multiply-add.

    Every step costs the same, so a default run is a hundredth of a pass.
    """
    take_no_data("vgg16", data)
    with torch.device("meta"):
        work = 6 * multiply_adds(_model(), SIDE)
    return Task(
        model=_model,
        data=Counted(SAMPLES),
        loss=cross_entropy,
        batch_size=32,
        epochs=0.01,
        name="vgg16",
        work=work,
        sizes_only=True,
    )


class Counted:
    """A data set of which only the number of samples is known."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> object:
        raise Refused("this task has sizes only, no samples: run it in virtual time")


def multiply_adds(model: nn.Sequential, side: int) -> int:
    """Multiply-adds of one forward pass of a chain of layers over an image of side x side pixels."""
    total = 0
    for layer in model:
        if isinstance(layer, nn.Conv2d):
            total += layer.weight.numel() * side * side
        elif isinstance(layer, nn.MaxPool2d):
            side //= 2
        elif isinstance(layer, nn.Linear):
            total += layer.weight.numel()
    return total


def _model() -> nn.Sequential:
    layers: list[nn.Module] = []
    channels, side = 3, SIDE
    for block in BLOCKS:
        for width in block:
            layers += [nn.Conv2d(channels, width, kernel_size=3, padding=1), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
        side //= 2
    layers.append(nn.Flatten())
    inputs = channels * side * side
    for _ in range(2):
        layers += [nn.Linear(inputs, 4096), nn.ReLU(), nn.Dropout()]
        inputs = 4096
    return nn.Sequential(*layers, nn.Linear(inputs, CLASSES))
