"""Models, metrics and checks that several tasks share."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from torch import Tensor, nn

from manyhands.core.errors import Refused


def mlp(*sizes: int) -> nn.Sequential:
    """Linear layers with ReLU between them, as a chain that can be split into stages anywhere.

    He initialisation: with torch's own, a chain this deep starts on a plateau and leaves it at a moment
    that depends on the seed.
    """
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        linear = nn.Linear(inputs, outputs)
        nn.init.kaiming_uniform_(linear.weight, nonlinearity="relu")
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def accuracy(outputs: Tensor, targets: Tensor) -> float:
    """The share of samples whose largest output is the target."""
    return (outputs.argmax(-1) == targets).float().mean().item()


def take_no_data(name: str, data: Path | None) -> None:
    """Refuse a folder that this task would not read."""
    if data is not None:
        raise Refused(f'the task "{name}" reads no files: leave out --data {data}')
