"""Running statistics: the mean and variance of BatchNorm, which every worker updates by its own mini-batches.

    r_k = q_k r_0 + (1 - q_k) e_k        q_k = (1 - m)^n_k, the weight of the initial value that is left after n_k
                                         batches;  e_k, what worker k has measured
    r   = q r_0 + (1 - q) e              e = sum_k s_k e_k / sum_k s_k,  q = min q_k

s_k is how many steps worker k has taken. So a worker with few batches, whose statistics are still near their initial
value, counts as little as it has seen. `num_batches_tracked` of the result is the largest of all workers, which has the
same q: the result is a state that a worker can continue from. With momentum None r_k is a mean over all batches, and
q_k = n_0 / (n_0 + n_k), where n_0 batches were counted before the run.

The variance is the mean of the workers' variances. As with one worker it is the variance within a mini-batch, without
that between the means of mini-batches: workers with different weights also have different means, and that difference is
no property of the data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class RunningStatistic:
    """A buffer of a module that counts its batches, as it was when the run began.

    Args:
        initial: r_0, the value.
        counter: the name of the buffer that counts the batches.
        began: n_0, the batches counted by then.
        momentum: m, the weight of a new batch; None: the same as of each batch before.
        lowest: the smallest value it can have.
    """

    initial: Tensor
    counter: str
    began: int
    momentum: float | None
    lowest: float

    def left(self, count: int) -> float:
        """q, the weight that the initial value has left when `count` batches are counted."""
        if self.momentum is None:
            return self.began / count if count else 1.0
        return float((1 - self.momentum) ** (count - self.began))

    def merge(self, values: Sequence[Tensor], shares: Sequence[float], counts: Sequence[int]) -> Tensor:
        """r of the workers' values; of equally many batches it is their mean."""
        left = [self.left(count) for count in counts]
        q = min(left)
        if q == max(left):
            return weighted_mean(values, shares)
        r0 = self.initial.double()
        measured = [(x - n * r0).div_(1 - n) for x, n in zip(values, left, strict=True) if n < 1]
        e = weighted_mean(measured, [share for share, n in zip(shares, left, strict=True) if n < 1])
        return (e * (1 - q) + r0 * q).clamp_(min=self.lowest).to(self.initial.dtype)


def running_statistics(model: nn.Module) -> Mapping[str, RunningStatistic]:
    """The running statistics of a model that has not been trained in this run, by the names of their buffers."""
    found: dict[str, RunningStatistic] = {}
    buffers = dict(model.named_buffers())
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        counter = f"{prefix}num_batches_tracked"
        for name, lowest in (f"{prefix}running_mean", -torch.inf), (f"{prefix}running_var", 0.0):
            if name in buffers and counter in buffers and hasattr(module, "momentum"):
                momentum = None if module.momentum is None else float(module.momentum)
                initial = buffers[name].clone()
                found[name] = RunningStatistic(initial, counter, int(buffers[counter]), momentum, lowest)
    return found


def weighted_mean(values: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """The mean of tensors, each with its share."""
    stacked = torch.stack(list(values))
    if min(shares) == max(shares):
        return stacked.mean(0)
    weights = torch.tensor(shares, dtype=torch.float64).div_(sum(shares))
    mean: Tensor = torch.tensordot(weights, stacked.double(), dims=1)
    return mean.to(stacked.dtype)
