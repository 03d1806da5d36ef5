"""GoogLeNet on ImageNet-1K: sizes only, for virtual time.

Inception v1 without the two auxiliary classifiers: 6,998,552 parameters, 22 layers with weights on the longest path. An
inception module concatenates four branches:

    x --+-- 1 x 1 ------------------+
        +-- 1 x 1 (reduce) - 3 x 3 -+
        +-- 1 x 1 (reduce) - 5 x 5 -+-- channels
        +-- max pool ------- 1 x 1 -+

Reference: C. Szegedy et al., "Going deeper with convolutions", 2015, https://arxiv.org/abs/1409.4842, table 1.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from manyhands.core.task import Task
from manyhands.tasks.imagenet import CLASSES, imagenet
from manyhands.tasks.parts import take_no_data

SIDE = 224
MODULES = (
    ((64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64)),
    (
        (192, 96, 208, 16, 48, 64),
        (160, 112, 224, 24, 64, 64),
        (128, 128, 256, 24, 64, 64),
        (112, 144, 288, 32, 64, 64),
        (256, 160, 320, 32, 128, 128),
    ),
    ((256, 160, 320, 32, 128, 128), (384, 192, 384, 48, 128, 128)),
)
"""Channels of modules 3a, 3b | 4a to 4e | 5a, 5b: of 1 x 1, reduction and 3 x 3, reduction and 5 x 5, after pooling."""


class Inception(nn.Module):
    """One inception module.

    Args:
        channels: of the input.
        widths: as in `MODULES`.
    """

    def __init__(self, channels: int, widths: tuple[int, int, int, int, int, int]) -> None:
        super().__init__()
        one, reduce_three, three, reduce_five, five, pooled = widths
        self.one = _convolution(channels, one, 1)
        self.three = nn.Sequential(_convolution(channels, reduce_three, 1), _convolution(reduce_three, three, 3))
        self.five = nn.Sequential(_convolution(channels, reduce_five, 1), _convolution(reduce_five, five, 5))
        self.pooled = nn.Sequential(nn.MaxPool2d(3, stride=1, padding=1), _convolution(channels, pooled, 1))
        self.channels = one + three + five + pooled

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pooled(x)], 1)


def googlenet(data: Path | None = None) -> Task:
    """The sizes of the network with nine inception modules."""
    take_no_data("googlenet", data)
    return imagenet("googlenet", _model, SIDE)


def _model() -> nn.Sequential:
    layers = [_convolution(3, 64, 7, stride=2), _halve(), nn.LocalResponseNorm(5)]
    layers += [_convolution(64, 64, 1), _convolution(64, 192, 3), nn.LocalResponseNorm(5)]
    channels = 192
    for part in MODULES:
        layers.append(_halve())
        for widths in part:
            module = Inception(channels, widths)
            layers.append(module)
            channels = module.channels
    return nn.Sequential(*layers, nn.AvgPool2d(7), nn.Flatten(), nn.Dropout(0.4), nn.Linear(channels, CLASSES))


def _convolution(channels: int, width: int, kernel: int, stride: int = 1) -> nn.Module:
    return nn.Sequential(nn.Conv2d(channels, width, kernel, stride, padding=kernel // 2), nn.ReLU())


def _halve() -> nn.Module:
    return nn.MaxPool2d(3, stride=2, ceil_mode=True)
