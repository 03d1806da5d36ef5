"""A method over teams of ranks, over the same method with single workers: what the grid itself costs.

team-of-one-over-worker   MLP of 10 M parameters, bsp, 2 workers in shared memory: each worker is a team of one rank

Both sides are loops of `hands.step` with the same model, data, seeds and batch size, and every process has one thread.
"""

from __future__ import annotations

from typing import Any

from _models import LEARNING_RATE, together
from _ranks import Commands, Side
from _side_by_side import measure, slowness

import manyhands as mh
from manyhands.report.progress import Progress
from manyhands.run.methods import over_team


def single(model_name: str, commands: Commands) -> None:
    """The method with single workers."""
    together("shm", mh.bsp(lr=LEARNING_RATE), model_name, commands)


def teams(model_name: str, commands: Commands) -> None:
    """The same over teams of one rank."""
    together("shm", over_team(mh.bsp(lr=LEARNING_RATE), mh.piped(1, micro_batches=1)), model_name, commands)


def run(progress: Progress) -> list[dict[str, Any]]:
    """Both sides in one run. Rounds are printed to stderr, because `progress` counts samples."""
    sides = [Side(name, side, ("mlp",)) for name, side in (("worker", single), ("team", teams))]
    mlp = measure("team mlp", sides, steps=5)
    return [slowness("team-of-one-over-worker", mlp["team"], mlp["worker"], "<= 1.03")]
