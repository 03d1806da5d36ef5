"""10,000 workers in one process: 10 steps of three methods on the sizes of VGG-16, in a process of its own.

It prints one JSON object: the wall seconds of each, and the peak memory of the process. It is a process of its own,
because the peak memory of a process includes everything it did before.
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
"""Methods, each with its number of servers."""


def peak_gib() -> float:
    """The peak memory of this process."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    assert found is not None
    return int(found[1]) / 2**20


def main() -> None:
    """Run the three methods in turn."""
    task, seconds = load("vgg16"), {}
    for name, (method, servers) in RUNS.items():
        cluster = Cluster(workers=WORKERS, servers=servers)
        progress = choose(f"{name}, {WORKERS:,} workers")
        seconds[name] = train(task, method, cluster=cluster, steps=STEPS, progress=progress).wall_seconds
    json.dump({"seconds": seconds, "peak_gib": peak_gib()}, sys.stdout)


if __name__ == "__main__":
    main()
