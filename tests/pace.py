"""Promises about seconds, tested against what the machine can do at that moment.

A promise such as "a lost rank ends the run within 2 seconds" is about our processes. On a machine whose cores are also
used by others the same work takes longer, so what took more than the promised seconds is held against a yardstick:
bare processes that compute, as many as a run has workers, and how much longer they take than the CPU time they get.
On an idle machine that factor is 1, and the promise is the plain number of seconds.
"""

import os
import subprocess
import sys
import time

WORKERS = 2
BUSY = "x = 0\nfor n in range(6_000_000): x += n"
"""About a third of a second of one core."""


def slowdown():
    """How much longer a bare process takes now than on a core of its own."""
    began = time.monotonic()
    processes = [subprocess.Popen([sys.executable, "-S", "-c", BUSY]) for _ in range(WORKERS)]
    factors = []
    for process in processes:
        _, _, usage = os.wait4(process.pid, 0)
        process.returncode = 0
        factors.append((time.monotonic() - began) / (usage.ru_utime + usage.ru_stime))
    return max(1.0, *factors)


def assert_within(limit, seconds):
    """Hold `seconds` that have passed against a promise of `limit` seconds."""
    if seconds < limit:
        return
    factor = slowdown()
    assert seconds < limit * factor, f"{seconds:.2f} s instead of {limit} s, where others' work makes it {factor:.1f}x"
