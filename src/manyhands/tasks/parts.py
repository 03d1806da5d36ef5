"""Models, metrics and checks that several tasks share."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import TypeVar

from torch import Tensor, nn

from manyhands.core.errors import Refused

Model = TypeVar("Model", bound=nn.Module)


def mlp(*sizes: int) -> nn.Sequential:
    """Linear layers with ReLU between them, as a chain that can be split into stages anywhere.

    He initialisation: with torch's own, a chain this deep starts on a plateau and leaves it at a moment
    that depends on the seed.
    """
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [he_initialised(nn.Linear(inputs, outputs)), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def he_initialised(model: Model) -> Model:
    """The model with new weights in its linear layers and convolutions, which keep the variance of what ReLU gets."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            nn.init.kaiming_uniform_(layer.weight, nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return model


def accuracy(outputs: Tensor, targets: Tensor) -> float:
    """The share of samples whose largest output is the target."""
    return (outputs.argmax(-1) == targets).float().mean().item()


def take_no_data(name: str, data: Path | None) -> None:
    """Refuse a folder that this task would not read."""
    if data is not None:
        raise Refused(f'the task "{name}" reads no files: leave out --data {data}')
