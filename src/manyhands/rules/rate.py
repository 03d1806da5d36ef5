"""The learning rate η: a number, or a function of the samples the job has consumed before an update.

It depends on samples and not on steps, so that a schedule means the same for any number of workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from manyhands.core.errors import refuse_unless
from manyhands.core.rule import UpdateContext

Rate = float | Callable[[int], float]
"""η, or samples -> η. A schedule may be 0 at some samples (a warm-up begins there); a constant must be > 0."""


def check_rate(lr: Rate) -> None:
    """Refuse a constant rate that is not positive and finite."""
    refuse_unless(callable(lr) or 0 < lr < math.inf, "lr", lr, "> 0 and finite")


def rate_at(lr: Rate, at: UpdateContext) -> float:
    """η for this update."""
    return (lr(at.samples) if callable(lr) else lr) * at.rate
