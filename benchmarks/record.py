"""What it costs to record every step of a run: CPU seconds of all processes, divided by the seconds of the run.

recording-cpu-share           a small convolutional network, whose steps take some ten milliseconds
recording-cpu-share-digits    digits, whose steps take less than one: an upper bound of the cost

Two processes train with bsp, and each step of each is a line of the record. In the ranks it counts what measures the
parts of a step and makes, encodes and sends its line; in the process that launched them it counts what writes the file
and reads the lines for the result. The calls of the clock are included: they are a fifth of the share of digits.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from _metered import Meter, Metered

from manyhands import Local, bsp
from manyhands.core.record import decoded
from manyhands.report.progress import Progress
from manyhands.report.record import Record
from manyhands.run.spec import RunSpec, make_spec
from manyhands.runtime.launch.launch import launch

RUNS = 5


def share(spec: RunSpec, out: Path, progress: Progress) -> float:
    """The share of one run."""
    here = Meter()
    progress.start(spec.samples, spec.task.name)
    with Record(out) as record:
        add = here.around(record.add)

        def write(parcels: tuple[bytes, ...]) -> None:
            for parcel in parcels:
                add(parcel)
                for line in decoded(parcel):
                    progress.step({"samples": line.get("samples", 0)})

        launched = launch(Metered(spec.packed()), workers=2, on_lines=write)
        here.around(lambda: record.lines)()
    progress.stop()
    costs = [one for one in launched.results if one is not None]
    return (here.seconds + sum(cost for cost, _ in costs)) / max(seconds for _, seconds in costs)


def median_share(task: str, steps: int, progress: Progress) -> float:
    """The median share of several runs."""
    spec = make_spec(task, bsp(lr=0.01), Local(2), steps=steps)
    with tempfile.TemporaryDirectory() as folder:
        shares = [share(spec, Path(folder, str(number)), progress) for number in range(RUNS)]
    return round(median(shares), 4)


def run(progress: Progress) -> list[dict[str, Any]]:
    """Both figures and their bounds."""
    return [
        {"name": "recording-cpu-share", "value": median_share("_metered:cnn", 100, progress), "goal": "<= 0.02"},
        {"name": "recording-cpu-share-digits", "value": median_share("digits", 2000, progress), "goal": "<= 0.02"},
    ]
