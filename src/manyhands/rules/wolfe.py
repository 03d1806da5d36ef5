"""Line search: the length of a step along a direction, by the strong Wolfe conditions.

    f(t) <= f(0) + c1 t f'(0)        sufficient decrease
    |f'(t)| <= c2 |f'(0)|            curvature: the step is not too short

The step grows until an interval contains such a point; then the interval shrinks around it. The next trial is the
minimum of the cubic that fits both ends. Only numbers are handled here: the caller stores the gradient of each trial.
The trials are those of torch.optim.LBFGS, except that a loss that is NaN counts as too high, so that the step shrinks.

Reference: J. Nocedal, S. Wright, "Numerical Optimization", 2006, chapter 3, https://doi.org/10.1007/978-0-387-40065-5.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

C1, C2 = 1e-4, 0.9
MOST = 25
"""The most trials of one search."""
NEAR = 1e-9
"""The search ends if no weight differs by more than this between the two ends of the interval."""


class Trial(NamedTuple):
    """The loss and its derivative at a step t."""

    t: float
    loss: float
    slope: float
    """f'(t), the derivative along the direction."""
    gradient: str
    """The name of its gradient in the `Space`."""


Evaluate = Callable[[float], Trial]
LineSearch = Callable[[Evaluate, Trial, float, float], Trial]
"""search(evaluate, start, t, reach): begins with step t; reach is the direction's largest |number|."""


def strong_wolfe(evaluate: Evaluate, start: Trial, t: float, reach: float) -> Trial:
    """The first trial that meets both conditions; if none does, the one with the lowest loss in the last interval."""
    old, new = start, evaluate(t)
    for tries in range(MOST):
        if not _low_enough(new, start) or (tries > 1 and new.loss >= old.loss):
            return _zoom(evaluate, start, old, new, reach, MOST - tries)
        if _flat_enough(new, start):
            return new
        if new.slope >= 0:
            return _zoom(evaluate, start, old, new, reach, MOST - tries)
        t = _between(old, new, new.t + 0.01 * (new.t - old.t), 10 * new.t)
        old, new = new, evaluate(t)
    return _sorted(start, new)[0]


def _zoom(evaluate: Evaluate, start: Trial, one: Trial, other: Trial, reach: float, tries: int) -> Trial:
    """Shrink the interval between two trials around a point that meets both conditions."""
    low, high = _sorted(one, other)
    near_end = False
    for _ in range(tries):
        if abs(high.t - low.t) * reach < NEAR:
            break
        t, near_end = _inside(low, high, near_end)
        new = evaluate(t)
        if not _low_enough(new, start) or new.loss >= low.loss:
            low, high = _sorted(low, new)
            continue
        if _flat_enough(new, start):
            return new
        low, high = new, low if new.slope * (high.t - low.t) >= 0 else high
    return low


def _low_enough(new: Trial, start: Trial) -> bool:
    return new.loss <= start.loss + C1 * new.t * start.slope


def _flat_enough(new: Trial, start: Trial) -> bool:
    return abs(new.slope) <= -C2 * start.slope


def _sorted(one: Trial, other: Trial) -> tuple[Trial, Trial]:
    """The one with the lower loss first."""
    return (one, other) if one.loss <= other.loss else (other, one)


def _inside(low: Trial, high: Trial, near_end: bool) -> tuple[float, bool]:
    """The next trial between two others; if it was near an end twice in a row, a tenth of the interval away from it."""
    left, right = sorted((low.t, high.t))
    t, edge = _between(low, high, left, right), 0.1 * (right - left)
    if min(right - t, t - left) >= edge:
        return t, False
    if not near_end and left < t < right:
        return t, True
    return (right - edge if right - t < t - left else left + edge), False


def _between(one: Trial, other: Trial, least: float, most: float) -> float:
    """The minimum of the cubic through two trials, clamped to the bounds; the middle if it has none."""
    (x1, f1, g1, _), (x2, f2, g2, _) = sorted((one, other), key=lambda trial: trial.t)
    a = g1 + g2 - 3 * (f1 - f2) / (x1 - x2)
    square = a * a - g1 * g2
    if square >= 0:  # False if a number is NaN
        root = math.sqrt(square)
        if curvature := g2 - g1 + 2 * root:
            return min(max(x2 - (x2 - x1) * (g2 + root - a) / curvature, least), most)
    return (least + most) / 2
