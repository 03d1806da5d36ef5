"""Sparse logistic regression: a million features, of which a sample has 64, as in texts and logs of clicks.

    p(y = 1 | x) = sigma(w . x)                                the loss is -log p(y | x)
    g_v = (1/b) sum_i (sigma(w . x_i) - y_i) x_iv              0 for every feature v that no sample of the b has

The samples are synthetic. Half of the features speak for a label of 1 (the odd ones), half for 0; a feature of a
sample is one that agrees with its label with probability 0.7. Frequent ones are drawn more often, as words are:
number N u^2 of N, u uniform.

Any method can train it: the model is a table with sparse gradients. Hogwild! was made for such problems, since two
samples hardly ever meet in a weight. For it the model can go down by itself (`Descends`): a mini-batch is one call of a
compiled kernel that reads the weights of its samples, and one that writes them. All are read before the first is
written, so a mini-batch is one update, as in every other method.

Reference: F. Niu, B. Recht, C. Re, S. Wright, "Hogwild!: a lock-free approach to parallelizing SGD", 2011,
https://arxiv.org/abs/1106.5730, which trains sparse linear models.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import TensorDataset

from manyhands.core.protocols import Descent
from manyhands.core.task import Task
from manyhands.tasks.native import dots, scatter
from manyhands.tasks.parts import take_no_data

FEATURES = 2**20
PRESENT = 64
"""Features that a sample has; a few of them may come twice."""
AGREES = 0.7
TRAIN, TEST = 16_384, 2_048


class Logistic(nn.Module):
    """One weight per feature, 0 at first. There is no bias: every sample would write it.

    Args:
        features: how many there are.
    """

    def __init__(self, features: int) -> None:
        super().__init__()
        start = torch.zeros(features, 1)
        self.table = nn.EmbeddingBag.from_pretrained(start, freeze=False, mode="sum", sparse=True)

    def forward(self, features: Tensor, values: Tensor) -> Tensor:
        """w . x for samples with these features and their values, both samples x present."""
        z: Tensor = self.table(features, per_sample_weights=values)
        return z.squeeze(-1)

    def can_descend(self, loss: Callable[..., Tensor] | None) -> bool:
        """Down the logistic loss."""
        return loss is binary_cross_entropy_with_logits and self.table.weight.requires_grad

    def descend(self, *fields: Tensor) -> Descent:
        """Features, values and targets; only the weights of these features are read, and will be written."""
        features, values, y = fields
        w = self.table.weight.detach().view(-1)
        z = dots(w, features, values)
        r = torch.sigmoid(z).sub_(y).div_(len(y))
        return Descent(binary_cross_entropy_with_logits(z, y), values.numel(), partial(scatter, w, features, values, r))


def sparse(data: Path | None = None) -> Task:
    """For which label do these features speak? The samples are the same for every seed."""
    take_no_data("sparse", data)
    fields = samples(TRAIN + TEST)
    return Task(
        model=partial(Logistic, FEATURES),
        data=TensorDataset(*(field[:TRAIN] for field in fields)),
        test=TensorDataset(*(field[TRAIN:] for field in fields)),
        loss=binary_cross_entropy_with_logits,
        metric=told_apart,
        batch_size=32,
        epochs=5,
        name="sparse",
        work=6 * PRESENT,
    )


def samples(count: int, seed: int = 0, features: int = FEATURES) -> tuple[Tensor, Tensor, Tensor]:
    """Features, values and labels; whatever the seed, the same features speak for the same label."""
    random = torch.Generator().manual_seed(seed)
    y = torch.randint(2, (count, 1), generator=random)
    pair = (torch.rand(count, PRESENT, generator=random).square() * (features // 2)).long()
    agrees = torch.rand(count, PRESENT, generator=random) < AGREES
    values = 0.5 + torch.rand(count, PRESENT, generator=random)
    return 2 * pair + torch.where(agrees, y, 1 - y), values, y.squeeze(1).float()


def told_apart(outputs: Tensor, targets: Tensor) -> float:
    """The share of samples that are on the right side."""
    return ((outputs > 0) == (targets > 0.5)).float().mean().item()
