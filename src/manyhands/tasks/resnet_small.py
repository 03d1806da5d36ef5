"""A small residual network with batch normalisation on handwritten digits.

    x --+-- convolution - BatchNorm - ReLU - convolution - BatchNorm --(+)-- ReLU
        +--------------------- x, or a 1 x 1 convolution of it ---------+

It is not a chain of layers, and it has buffers, the running statistics of BatchNorm. The digits have 8 x 8 pixels (the
task digits), or with --data 28 x 28 (the task mnist).

Reference: K. He, X. Zhang, S. Ren, J. Sun, "Deep residual learning for image recognition", 2016,
https://arxiv.org/abs/1512.03385.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn
from torch.nn.functional import relu

from manyhands.core.task import Task
from manyhands.tasks.images import CLASSES, digit_images
from manyhands.tasks.parts import he_initialised

NAME = "resnet-small"
WIDTHS = (16, 16, 32)
"""Channels of the blocks; a block that has more than the one before halves the sides."""
EPOCHS, MNIST_EPOCHS = 15, 1


class ResidualBlock(nn.Module):
    """Two convolutions, and a connection that skips them.

    Args:
        channels: of the input.
        width: channels of the output.
    """

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        stride = 1 if channels == width else 2
        self.first = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(width)
        self.skip = nn.Identity() if channels == width else nn.Conv2d(channels, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = relu(self.first_norm(self.first(x)))
        return relu(self.second_norm(self.second(y)) + self.skip(x))


class SmallResNet(nn.Module):
    """A convolution, residual blocks, the mean over all pixels, and a fully connected layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, WIDTHS[0], 3, padding=1, bias=False)
        self.stem_norm = nn.BatchNorm2d(WIDTHS[0])
        self.blocks = nn.Sequential(*map(ResidualBlock, (WIDTHS[0], *WIDTHS), WIDTHS))
        self.classify = nn.Linear(WIDTHS[-1], CLASSES)
        he_initialised(self)

    def forward(self, x: Tensor) -> Tensor:
        features = self.blocks(relu(self.stem_norm(self.stem(x))))
        classes: Tensor = self.classify(features.mean((2, 3)))
        return classes


def resnet_small(data: Path | None = None) -> Task:
    """Classify images of digits by residual blocks.

    Args:
        data: the folder of MNIST; None: the bundled digits.
    """
    images = digit_images(data)
    return images.task(NAME, SmallResNet, EPOCHS if data is None else MNIST_EPOCHS)
