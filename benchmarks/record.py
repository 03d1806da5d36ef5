"""What it costs to write down every step of a run, in CPU seconds of all processes over the seconds of the run.

recording-cpu-share           a small convolutional network, whose steps take some ten milliseconds
recording-cpu-share-digits    digits, whose steps take less than one: the most that recording can cost

Two processes train with bsp, and each step of each is a line. In the ranks counts whatever keeps the time of a step and
makes, encodes and sends its line; where they were started, writing the file and reading the lines for the result.
Looking at the clock counts as well: of digits' share it is a fifth.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from _metered import Meter, Metered

from manyhands import bsp, processes
from manyhands.core.lines import decoded
from manyhands.plan import Plan, machines, make_plan
from manyhands.processes import Named
from manyhands.report.progress import Progress
from manyhands.report.record import Record
from manyhands.runtime.launch import launch

RUNS = 5


def share(plan: Plan, named: Named, out: Path, progress: Progress) -> float:
    """Of one run."""
    here = Meter()
    progress.start(plan.samples, plan.task.name)
    with Record(out) as record:
        add = here.around(record.add)

        def write(parcels: tuple[bytes, ...]) -> None:
            for parcel in parcels:
                add(parcel)
                for line in decoded(parcel):
                    progress.step({"samples": line.get("samples", 0)})

        program = Metered(replace(plan, task=processes._nothing), named)
        launched = launch(program, workers=2, on_lines=write)
        here.around(lambda: record.lines)()
    progress.stop()
    costs = [one for one in launched.results if one is not None]
    return (here.seconds + sum(cost for cost, _ in costs)) / max(seconds for _, seconds in costs)


def median_share(task: str, steps: int, progress: Progress) -> float:
    """Of some runs."""
    strategy, named = bsp(lr=0.01), Named(task)
    where = machines(strategy, None, 2, None, "shm", "127.0.0.1")
    plan = make_plan(named.load(), strategy, where, 0, steps, None, None, False)
    with tempfile.TemporaryDirectory() as folder:
        shares = [share(plan, named, Path(folder, str(number)), progress) for number in range(RUNS)]
    return round(median(shares), 4)


def run(progress: Progress) -> list[dict[str, Any]]:
    """Both figures."""
    return [
        {"name": "recording-cpu-share", "value": median_share("_metered:cnn", 100, progress), "goal": "<= 0.02"},
        {"name": "recording-cpu-share-digits", "value": median_share("digits", 2000, progress), "goal": "<= 0.02"},
    ]
