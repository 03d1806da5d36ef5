"""How much faster Hogwild! is with two processes than with one, on the same weights.

mlp-2-over-1    samples per second of two processes over those of one, MLP of 9,600 parameters
"""

from __future__ import annotations

from typing import Any

from _models import LEARNING_RATE, together
from _ranks import Commands, Side
from _side_by_side import measure, speed

import manyhands as mh
from manyhands.report.progress import Progress


def mlp(commands: Commands) -> None:
    """One rank."""
    together("shm", mh.hogwild(lr=LEARNING_RATE), "small", commands)


def run(progress: Progress) -> list[dict[str, Any]]:
    """Rounds are told in lines of their own, for `progress` counts samples."""
    small = measure("hogwild small", [Side("one", mlp, ranks=1), Side("two", mlp)], steps=300)
    per_sample = [seconds / 2 for seconds in small["two"]]
    return [speed("mlp-2-over-1", per_sample, small["one"], ">= 1.8")]
