"""What tests of real processes share: nothing is left over by any of them."""

import os
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from fake_ranks import Job


@pytest.fixture
def job():
    jobs = []

    def make(size, **knobs):
        jobs.append(Job(size, **knobs))
        return jobs[-1]

    yield make
    processes = [process for made in jobs for process in made.processes.values()]
    running = [process for process in processes if process.poll() is None]
    for process in processes:
        process.kill()
        process.stdout.close()
        process.wait()
    assert not running


def children():
    """The processes below this one that a test may have started."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # a thread that has just ended
            for pid in (task / "children").read_text().split():
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                if b"resource_tracker" not in command and b"forkserver" not in command:
                    found.add(int(pid))
    return found


def memories():
    links = [os.path.realpath(path) for path in Path("/proc/self/fd").iterdir()]
    return [link for link in links if "memfd:" in link]


@pytest.fixture(autouse=True)
def nothing_is_left_over():
    before = children(), threading.active_count(), len(memories())
    yield
    after = children(), threading.active_count(), len(memories())
    assert after == before
