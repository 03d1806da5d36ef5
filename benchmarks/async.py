"""Samples per second of ssp with 2 workers on one machine, relative to no communication.

mlp-shm      an MLP of 10 M parameters: copying the weights dominates
small-shm    an MLP of 9,600 parameters, 0.7 ms a step: every microsecond of overhead is measurable

The peer is a plain loop without communication: forward, backward, torch's SGD. Two processes run it at the
same time.
"""

from __future__ import annotations

from typing import Any

from _models import LEARNING_RATE, alone, together
from _ranks import Commands, Side
from _side_by_side import measure, speed

import manyhands as mh
from manyhands.report.progress import Progress


def ours(link: str, model_name: str, commands: Commands) -> None:
    """Our side: ssp over `link`."""
    together(link, mh.ssp(staleness=3, lr=LEARNING_RATE), model_name, commands)


def run(progress: Progress) -> list[dict[str, Any]]:
    """Both models. Rounds are printed to stderr, because `progress` counts samples."""
    mlp = measure("ssp mlp", sides("mlp"), steps=5)
    small = measure("ssp small", sides("small"), steps=500)
    return [
        speed("mlp-shm", mlp["shm"], mlp["alone"], ">= 0.80"),
        speed("small-shm", small["shm"], small["alone"], ">= 0.80"),
    ]


def sides(model_name: str) -> list[Side]:
    """The sides: no communication, and ours."""
    return [Side("alone", alone, (model_name,)), Side("shm", ours, ("shm", model_name))]
