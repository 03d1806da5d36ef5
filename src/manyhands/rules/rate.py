"""The learning rate η: a number, or a function of the samples the job has consumed so far.

Samples and not steps, so that a schedule means the same whatever the number of workers is.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from manyhands.core.errors import refuse_unless
from manyhands.core.protocols import At

Rate = float | Callable[[int], float]
"""η, or samples -> η. A schedule may give 0 for a while (a warm-up does), a number must be > 0."""


def check_rate(lr: Rate) -> None:
    """Refuse a constant rate that cannot train."""
    refuse_unless(callable(lr) or 0 < lr < math.inf, "lr", lr, "> 0 and finite")


def rate_at(lr: Rate, at: At) -> float:
    """η for this update."""
    return (lr(at.samples) if callable(lr) else lr) * at.rate
