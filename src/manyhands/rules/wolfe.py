"""Line search: how far to go down a direction, by the strong conditions of Wolfe.

    f(t) <= f(0) + c1 t f'(0)        low enough for the way it went
    |f'(t)| <= c2 |f'(0)|            and flat enough: it did not stop too early

First the step grows until the two ends of an interval have such a point between them; then the interval shrinks around
it. Where to look next says the cubic that fits both ends. Only numbers are handled here; whoever evaluates a trial
keeps its gradient. The trials are those of torch.optim.LBFGS, except that a loss which is no number counts as too
high, so that the search turns back.

Reference: J. Nocedal, S. Wright, "Numerical Optimization", 2006, chapter 3, https://doi.org/10.1007/978-0-387-40065-5.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

C1, C2 = 1e-4, 0.9
MOST = 25
"""Trials of one search."""
NEAR = 1e-9
"""An interval is used up when no weight would move by more than that from one end to the other."""


class Trial(NamedTuple):
    """What was found at a step t."""

    t: float
    loss: float
    slope: float
    """f'(t), the gradient's part along the direction."""
    gradient: str
    """What it is called where it lies."""


Evaluate = Callable[[float], Trial]
LineSearch = Callable[[Evaluate, Trial, float, float], Trial]
"""search(evaluate, start, t, reach): begins with step t; reach is the direction's largest number."""


def strong_wolfe(evaluate: Evaluate, start: Trial, t: float, reach: float) -> Trial:
    """The first trial that meets both conditions; if there is none, the lowest one of the last interval."""
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
    """Shrink the interval between two trials."""
    low, high = _sorted(one, other)
    hesitated = False
    for _ in range(tries):
        if abs(high.t - low.t) * reach < NEAR:
            break
        t, hesitated = _inside(low, high, hesitated)
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
    """The lower one first."""
    return (one, other) if one.loss <= other.loss else (other, one)


def _inside(low: Trial, high: Trial, hesitated: bool) -> tuple[float, bool]:
    """Where to look between two trials; if it was near an end twice in a row, a tenth of the interval away from it."""
    left, right = sorted((low.t, high.t))
    t, edge = _between(low, high, left, right), 0.1 * (right - left)
    if min(right - t, t - left) >= edge:
        return t, False
    if not hesitated and left < t < right:
        return t, True
    return (right - edge if right - t < t - left else left + edge), False


def _between(one: Trial, other: Trial, least: float, most: float) -> float:
    """The minimum of the cubic through two trials, kept within bounds; their middle if it has none."""
    (x1, f1, g1, _), (x2, f2, g2, _) = sorted((one, other), key=lambda trial: trial.t)
    a = g1 + g2 - 3 * (f1 - f2) / (x1 - x2)
    square = a * a - g1 * g2
    if square >= 0:  # not so if anything is no number
        root = math.sqrt(square)
        if curvature := g2 - g1 + 2 * root:
            return min(max(x2 - (x2 - x1) * (g2 + root - a) / curvature, least), most)
    return (least + most) / 2
