"""A restricted Boltzmann machine trained on digits: its layers were once used to pretrain deep networks.

    p(h | v) = sigma(v W + c)        p(v | h) = sigma(h W^T + b)

It has no loss to differentiate. Contrastive divergence has its own gradient: the statistics of the model after one
step of Gibbs sampling, minus those of the data,

    g_W = v1^T h1 - v0^T h0        h0 from the data v0, v1 from a sample of h0, h1 from v1

The reported loss is the squared distance of v1 from v0.

Reference: G. Hinton, "Training products of experts by minimizing contrastive divergence", 2002,
https://doi.org/10.1162/089976602760128018.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from manyhands.core.task import Task
from manyhands.tasks.digits import digits
from manyhands.tasks.parts import take_no_data


class Boltzmann(nn.Module):
    """Visible and hidden units, each connected with all of the other kind."""

    def __init__(self, visible: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.randn(visible, hidden))
        self.visible = nn.Parameter(torch.zeros(visible))
        self.hidden = nn.Parameter(torch.zeros(hidden))

    def infer(self, v: Tensor) -> Tensor:
        """The probabilities of the hidden units, p(h | v)."""
        return torch.sigmoid(v @ self.weight + self.hidden)

    def imagine(self, h: Tensor) -> Tensor:
        """The probabilities of the visible units, p(v | h)."""
        return torch.sigmoid(h @ self.weight.T + self.visible)

    def forward(self, v: Tensor) -> Tensor:
        """The reconstruction of v."""
        return self.imagine(self.infer(v))


def contrastive_divergence(model: Boltzmann, v0: Tensor, _: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
    """The reconstruction error and the gradient of contrastive divergence."""
    h0 = model.infer(v0)
    v1 = model.imagine(torch.bernoulli(h0))
    h1 = model.infer(v1)
    return (v1 - v0).square().sum(1).mean(), {
        "weight": (v1.T @ h1 - v0.T @ h0) / len(v0),
        "visible": (v1 - v0).mean(0),
        "hidden": (h1 - h0).mean(0),
    }


def recognised(outputs: Tensor, targets: Tensor) -> float:
    """The share of pixels that are reconstructed correctly, as on or off."""
    return (outputs.round() == targets.round()).float().mean().item()


def rbm(data: Path | None = None) -> Task:
    """Model the distribution of digits, without labels."""
    take_no_data("rbm", data)
    given = digits()
    (x, _), (seen, _) = given.data.tensors, given.test.tensors
    return Task(
        model=partial(Boltzmann, 64, 64),
        data=TensorDataset(x, x),
        test=TensorDataset(seen, seen),
        gradient=contrastive_divergence,
        metric=recognised,
        batch_size=32,
        epochs=40,
        name="rbm",
    )
