"""A small convolutional network on handwritten digits, in the manner of LeNet.

    convolution 3 x 3 - ReLU - max pool 2 x 2, twice; then two fully connected layers

The digits have 8 x 8 pixels (the task digits), or with --data 28 x 28 (the task mnist). The convolutions do most of the
work, the first fully connected layer has most of the weights.

Reference: Y. LeCun, L. Bottou, Y. Bengio, P. Haffner, "Gradient-based learning applied to document recognition", 1998,
https://doi.org/10.1109/5.726791.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from torch import nn

from manyhands.core.task import Task
from manyhands.tasks.images import CLASSES, digit_images
from manyhands.tasks.parts import he_initialised

EPOCHS, MNIST_EPOCHS = 20, 2


def cnn(data: Path | None = None) -> Task:
    """Classify images of digits by convolutions.

    Args:
        data: the folder of MNIST; None: the bundled digits.
    """
    images = digit_images(data)
    return images.task("cnn", partial(_model, images.side), EPOCHS if data is None else MNIST_EPOCHS)


def _model(side: int) -> nn.Sequential:
    features = 32 * (side // 4) ** 2
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(features, 64),
        nn.ReLU(),
        nn.Linear(64, CLASSES),
    )
    return he_initialised(model)
