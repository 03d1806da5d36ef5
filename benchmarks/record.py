"""What it costs to write down every step of a run.

recording-cpu-share    CPU seconds spent on the record, by all ranks and where they were started, over its seconds

Two processes train digits with bsp, whose steps take about a millisecond: each is a line. In the ranks counts whatever
keeps the time of a step and makes, packs and sends its line; where they were started, reading parcels and writing the
file. Looking at the clock so often counts as well.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from _metered import Meter, Metered

from manyhands import bsp, processes
from manyhands.plan import Plan, machines, make_plan
from manyhands.processes import Named
from manyhands.report.progress import Progress
from manyhands.report.record import Line, Record
from manyhands.runtime.launch import launch

STEPS = 2000
RUNS = 5


def share(plan: Plan, out: Path, progress: Progress) -> float:
    """Of one run."""
    here = Meter()
    progress.start(plan.samples, "digits")
    with Record(out) as record:

        def write(rows: tuple[Line, ...]) -> None:
            here.around(lambda: [record.write(row) for row in rows])()
            for row in rows:
                progress.step({"samples": row.get("samples", 0)})

        program = Metered(replace(plan, task=processes._nothing), Named("digits"))
        launched = launch(program, workers=2, on_lines=write)
    progress.stop()
    costs = [one for one in launched.results if one is not None]
    return (here.seconds + sum(cost for cost, _ in costs)) / max(seconds for _, seconds in costs)


def run(progress: Progress) -> list[dict[str, Any]]:
    """The median of some runs."""
    strategy = bsp()
    where = machines(strategy, None, 2, None, "shm", "127.0.0.1")
    plan = make_plan(Named("digits").load(), strategy, where, 0, STEPS, None, None, False)
    with tempfile.TemporaryDirectory() as folder:
        found = median(share(plan, Path(folder, str(number)), progress) for number in range(RUNS))
    return [{"name": "recording-cpu-share", "value": round(found, 4), "goal": "<= 0.02"}]
