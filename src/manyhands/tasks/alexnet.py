"""AlexNet on ImageNet-1K: sizes only, for virtual time.

The original network of 60,965,224 parameters. It was divided over two GPUs: in the convolutions 2, 4 and 5 each half
of the channels sees only its own half of the previous layer, which is `groups=2` here.

Reference: A. Krizhevsky, I. Sutskever, G. Hinton, "ImageNet classification with deep convolutional neural networks",
2012, https://doi.org/10.1145/3065386. A. Krizhevsky, "One weird trick for parallelizing convolutional neural networks",
2014, https://arxiv.org/abs/1404.5997: convolutions have about 5 % of the weights and do 90 to 95 % of the work, so they
are trained data-parallel and the other layers model-parallel. In this network they have 3.8 % and do 91.5 %.
"""

from __future__ import annotations

from pathlib import Path

from torch import nn

from manyhands.core.task import Task
from manyhands.tasks.imagenet import CLASSES, imagenet
from manyhands.tasks.parts import take_no_data

SIDE = 227
"""As in the sizes of the layers; the paper's text says 224."""


def alexnet(data: Path | None = None) -> Task:
    """The sizes of the network with five convolutions and three fully connected layers."""
    take_no_data("alexnet", data)
    return imagenet("alexnet", _model, SIDE)


def _model() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 96, 11, stride=4),
        nn.ReLU(),
        nn.LocalResponseNorm(5, alpha=1e-4, beta=0.75, k=2.0),
        nn.MaxPool2d(3, stride=2),
        nn.Conv2d(96, 256, 5, padding=2, groups=2),
        nn.ReLU(),
        nn.LocalResponseNorm(5, alpha=1e-4, beta=0.75, k=2.0),
        nn.MaxPool2d(3, stride=2),
        nn.Conv2d(256, 384, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(384, 384, 3, padding=1, groups=2),
        nn.ReLU(),
        nn.Conv2d(384, 256, 3, padding=1, groups=2),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2),
        nn.Flatten(),
        nn.Dropout(),
        nn.Linear(256 * 6 * 6, 4096),
        nn.ReLU(),
        nn.Dropout(),
        nn.Linear(4096, 4096),
        nn.ReLU(),
        nn.Linear(4096, CLASSES),
    )
