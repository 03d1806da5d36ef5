"""VGG-16 on ImageNet-1K: sizes only, for virtual time. Nothing is downloaded, nothing is trained.

Reference: K. Simonyan, A. Zisserman, Very Deep Convolutional Networks for Large-Scale Image Recognition, 2015,
https://arxiv.org/abs/1409.1556, configuration D.
"""

from __future__ import annotations

from pathlib import Path

from torch import nn

from manyhands.core.task import Task
from manyhands.tasks.imagenet import CLASSES, imagenet
from manyhands.tasks.parts import take_no_data

BLOCKS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
"""Channels of the 3 x 3 convolutions; each block ends with pooling that halves the sides."""
SIDE = 224


def vgg16(data: Path | None = None) -> Task:
    """The sizes of the network with 16 layers that have weights: 138,357,544 parameters."""
    take_no_data("vgg16", data)
    return imagenet("vgg16", _model, SIDE)


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
