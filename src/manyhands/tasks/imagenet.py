"""ImageNet-1K, the sizes only: what networks for it are trained on in virtual time. Nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from manyhands.core.task import Task

SAMPLES = 1_281_167
CLASSES = 1000


class ImageSizes:
    """A data set of which only the number of samples and their sizes are known.

    Args:
        side: the pixels of a side of an image.
        samples: the number of images.
    """

    def __init__(self, side: int, samples: int = SAMPLES) -> None:
        self.side = side
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = torch.empty(3, self.side, self.side, device="meta")
        return image, torch.empty((), dtype=torch.long, device="meta")


def imagenet(name: str, model: Callable[[], nn.Module], side: int) -> Task:
    """The sizes of a network and of its data. Every step costs the same, so a default run is a hundredth of a pass."""
    return Task(
        model=model,
        data=ImageSizes(side),
        loss=cross_entropy,
        batch_size=32,
        epochs=0.01,
        name=name,
        sizes_only=True,
    )
