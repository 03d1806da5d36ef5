"""Sparse logistic regression: a million features, of which a sample has 64, as in texts and click logs.

    p(y = 1 | x) = sigma(w . x)                                the loss is -log p(y | x)
    g_v = (1/b) sum_i (sigma(w . x_i) - y_i) x_iv              0 for every feature v that no sample of the b has

The samples are synthetic. Odd features indicate the label 1, even ones the label 0; each feature of a sample agrees
with its label with probability 0.7. As with words, some features are frequent: a feature is number N u^2 of N, with u
uniform.

Any method can train it: the model is an embedding table with sparse gradients. Hogwild! was made for such problems,
since two samples rarely share a weight. For it the model computes and writes its own step (`can_descend`, `descend`):
one call of a compiled kernel reads the weights of a mini-batch, one writes them. All are read before the first is
written, so that a mini-batch is one update, as in every other method.

Reference: F. Niu, B. Recht, C. Re, S. Wright, "Hogwild!: a lock-free approach to parallelizing SGD", 2011,
https://arxiv.org/abs/1106.5730, which trains sparse linear models.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import TensorDataset

from manyhands.core.task import Task
from manyhands.tasks.parts import take_no_data
from manyhands.tasks.sparse_kernels import dots, scatter

FEATURES = 2**20
PRESENT = 64
"""Features of a sample; a few of them may occur twice."""
AGREES = 0.7
"""The probability that a feature agrees with the label of its sample."""
TRAIN, TEST = 16_384, 2_048


class LogisticDescent(NamedTuple):
    """A step of plain SGD, computed but not yet written."""

    loss: Tensor
    touches: int
    """How many numbers `write` writes."""
    write: Callable[[float], None]
    """write(scale): w_v <- w_v + scale g_v for the features v of the mini-batch, in place."""


class Logistic(nn.Module):
    """One weight per feature, initially 0. There is no bias: every sample would write it.

    Args:
        features: the number of features.
    """

    def __init__(self, features: int) -> None:
        super().__init__()
        start = torch.zeros(features, 1)
        self.table = nn.EmbeddingBag.from_pretrained(start, freeze=False, mode="sum", sparse=True)

    def forward(self, features: Tensor, values: Tensor) -> Tensor:
        """w . x for samples with these features and values; both tensors are samples x present."""
        z: Tensor = self.table(features, per_sample_weights=values)
        return z.squeeze(-1)

    def can_descend(self, loss: Callable[..., Tensor] | None) -> bool:
        """Whether the loss is the logistic loss, whose gradient is known, and the weights are trained."""
        return loss is binary_cross_entropy_with_logits and self.table.weight.requires_grad

    def descend(self, *fields: Tensor) -> LogisticDescent:
        """Compute a step from features, values and targets; it reads and writes the weights of these features only."""
        features, values, y = fields
        w = self.table.weight.detach().view(-1)
        z = dots(w, features, values)
        r = torch.sigmoid(z).sub_(y).div_(len(y))
        loss = binary_cross_entropy_with_logits(z, y)
        return LogisticDescent(loss, values.numel(), partial(scatter, w, features, values, r))


def sparse(data: Path | None = None) -> Task:
    """Predict a binary label from 64 of a million features. The samples are the same for every seed."""
    take_no_data("sparse", data)
    fields = samples(TRAIN + TEST)
    return Task(
        model=partial(Logistic, FEATURES),
        data=TensorDataset(*(field[:TRAIN] for field in fields)),
        test=TensorDataset(*(field[TRAIN:] for field in fields)),
        loss=binary_cross_entropy_with_logits,
        metric=sign_accuracy,
        batch_size=32,
        epochs=5,
        name="sparse",
        work=6 * PRESENT,
    )


def samples(count: int, seed: int = 0, features: int = FEATURES) -> tuple[Tensor, Tensor, Tensor]:
    """Features, values and labels; a feature indicates the same label for every seed."""
    random = torch.Generator().manual_seed(seed)
    y = torch.randint(2, (count, 1), generator=random)
    pair = (torch.rand(count, PRESENT, generator=random).square() * (features // 2)).long()
    agrees = torch.rand(count, PRESENT, generator=random) < AGREES
    values = 0.5 + torch.rand(count, PRESENT, generator=random)
    return 2 * pair + torch.where(agrees, y, 1 - y), values, y.squeeze(1).float()


def sign_accuracy(outputs: Tensor, targets: Tensor) -> float:
    """The fraction of samples whose output has the sign of their label."""
    return ((outputs > 0) == (targets > 0.5)).float().mean().item()
