"""Learning rates that change with the samples consumed before an update, n.

    WarmUp      from `low` to η, linearly over N samples, or constant `low` for N samples; then η
    StepDecay   η f^⌊n / N⌋
    Cosine      low + (η - low) (1 + cos(π n / N)) / 2,  then low

They can be nested, and used wherever a rule takes a rate: `Sgd(WarmUp(Cosine(0.1, 100_000), 5_000))`, on the command
line `sgd(warmup(cosine(0.1, 100000), 5000))`.

Reference: P. Goyal et al., "Accurate, Large Minibatch SGD" (both warm-ups), 2017, https://arxiv.org/abs/1706.02677;
I. Loshchilov, F. Hutter, "SGDR" (cosine), 2016, https://arxiv.org/abs/1608.03983.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import cos, inf, pi

from manyhands.core.errors import refuse_unless
from manyhands.rules.rate import Rate, check_rate

__all__ = ["Cosine", "StepDecay", "WarmUp"]


def _value(lr: Rate, n: int) -> float:
    return lr(n) if callable(lr) else lr


@dataclass(frozen=True)
class RateWarmUp:
    """A low rate at the beginning of a run.

    Args:
        lr: η, or another schedule, which also begins at sample 0.
        samples: N, the length of the warm-up.
        low: the rate at the beginning.
        gradual: rise linearly; otherwise stay at `low`, which must be above 0 then.
    """

    lr: Rate
    samples: float
    low: float = 0.0
    gradual: bool = True

    def __post_init__(self) -> None:
        check_rate(self.lr)
        refuse_unless(self.samples > 0, "samples", self.samples, "> 0")
        refuse_unless(0 <= self.low < inf, "low", self.low, ">= 0 and finite")
        refuse_unless(self.gradual or self.low > 0, "low", self.low, "> 0 unless gradual: the weights would not move")

    def __call__(self, n: int) -> float:
        η, done = _value(self.lr, n), n / self.samples
        if done >= 1:
            return η
        return self.low + (η - self.low) * done if self.gradual else self.low


@dataclass(frozen=True)
class StepDecay:
    """A rate that falls by a factor at regular intervals.

    Args:
        lr: η at first, or another schedule.
        every: N, samples between two falls.
        factor: f, by which the rate is multiplied at each fall.
    """

    lr: Rate
    every: float
    factor: float = 0.1

    def __post_init__(self) -> None:
        check_rate(self.lr)
        refuse_unless(self.every > 0, "every", self.every, "> 0")
        refuse_unless(0 < self.factor <= 1, "factor", self.factor, "> 0 and <= 1")

    def __call__(self, n: int) -> float:
        return _value(self.lr, n) * self.factor ** int(n // self.every)


@dataclass(frozen=True)
class Cosine:
    """A rate that falls along half a period of a cosine.

    Args:
        lr: η at first, or another schedule.
        samples: N, after which the rate is `low`.
        low: the final rate.
    """

    lr: Rate
    samples: float
    low: float = 0.0

    def __post_init__(self) -> None:
        check_rate(self.lr)
        refuse_unless(self.samples > 0, "samples", self.samples, "> 0")
        refuse_unless(0 <= self.low < inf, "low", self.low, ">= 0 and finite")

    def __call__(self, n: int) -> float:
        done = min(1.0, n / self.samples)
        return self.low + (_value(self.lr, n) - self.low) * (1 + cos(pi * done)) / 2


WarmUp = RateWarmUp


EXAMPLES: Mapping[str, Rate] = {
    "warm-up": WarmUp(0.1, 500, low=0.01),
    "constant warm-up": WarmUp(0.1, 500, low=0.01, gradual=False),
    "step decay": StepDecay(0.1, 300, 0.5),
    "cosine": Cosine(0.1, 1000, low=0.001),
    "warm-up of a cosine": WarmUp(Cosine(0.1, 1000), 200),
}
