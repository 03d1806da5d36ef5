"""What the four scripts on digits share: a small residual network, its data and how it is evaluated.

Digits of MNIST (28 x 28 pixels) are read from the folder `mnist` of a data folder; without one, the 8 x 8 digits that
come with manyhands are used, so that nothing has to be downloaded.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import relu
from torch.utils.data import DataLoader, TensorDataset

from manyhands.tasks.digits import digits
from manyhands.tasks.mnist import mnist


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = relu(self.norm1(self.conv1(x)))
        return relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Sequential):
    """Three residual blocks for images of any size.

    Args:
        width: channels of the first block.
    """

    def __init__(self, width: int) -> None:
        super().__init__(
            nn.Conv2d(1, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            Block(width, width, 1),
            Block(width, 2 * width, 2),
            Block(2 * width, 4 * width, 2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4 * width, 10),
        )


def groups(model: nn.Module, decay: float = 0.05) -> list[dict[str, object]]:
    """Parameter groups of an optimizer: norms and biases have no weight decay."""
    matrices, others = ([p for p in model.parameters() if (p.dim() > 1) is one] for one in (True, False))
    return [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]


def load_digits(data: str | None) -> tuple[TensorDataset, TensorDataset]:
    """Training and test data as images with one channel."""
    task = mnist(Path(data) / "mnist") if data else digits()
    return _images(task.data), _images(task.test)


def _images(samples: object) -> TensorDataset:
    assert isinstance(samples, TensorDataset)
    x, y = samples.tensors
    side = round(x.shape[1] ** 0.5)
    return TensorDataset(x.view(-1, 1, side, side), y)


@torch.no_grad()
def evaluate(model: nn.Module, test: TensorDataset) -> float:
    """The share of the test data that is classified correctly."""
    model.eval()
    right = sum(int((model(x).argmax(1) == y).sum()) for x, y in DataLoader(test, 500))
    model.train()
    return right / len(test)
