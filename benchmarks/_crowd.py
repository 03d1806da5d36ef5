"""10,000 workers in one process: 10 steps of three methods on the sizes of VGG-16, as a program of its own.

It prints one JSON object: the wall seconds of each, and the most memory that the process has had. A program of its own,
since a process does not forget what it needed before.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from manyhands import Cluster, bsp, gossip, ssp, train
from manyhands.report.progress import choose
from manyhands.tasks import load

WORKERS, STEPS = 10_000, 10
RUNS = {
    "bsp": (bsp(collective="native"), 0),
    "ssp": (ssp(staleness=3), 2),
    "gossip": (gossip(), 0),
}
"""Methods, and how many servers each has."""


def peak_gib() -> float:
    """The most memory that this process has had at once."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    assert found is not None
    return int(found[1]) / 2**20


def main() -> None:
    """One after the other."""
    task, seconds = load("vgg16"), {}
    for name, (method, servers) in RUNS.items():
        cluster = Cluster(workers=WORKERS, servers=servers)
        progress = choose(f"{name}, {WORKERS:,} workers")
        seconds[name] = train(task, method, cluster=cluster, steps=STEPS, progress=progress).wall_seconds
    json.dump({"seconds": seconds, "peak_gib": peak_gib()}, sys.stdout)


if __name__ == "__main__":
    main()
