"""What every test may ask for."""

import gc
import multiprocessing
import os
import signal
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)

collect_ignore = ["matrix"]  # whole runs of every method: `make soak` asks for them by name

# For the processes that tests start: lines that several ranks print stay whole, and nothing is compiled twice.
for name in ("PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"):
    os.environ.pop(name, None)

# Shells start what runs in the background with interrupts ignored, and whoever is started from there inherits that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# What takes seconds to import; processes forked from one that has done so and nothing else start in no time.
multiprocessing.set_forkserver_preload(
    ["torch.distributed", "manyhands.engines.local", "manyhands.runtime.launch.join", "manyhands.cli.train", "pytest"]
)


def pytest_collection_finish():
    """Thousands of tests stay in memory until the end: do not look through them again and again for garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder with `mnist/` and `text/`."""
    folder = os.environ.get("MANYHANDS_DATA")
    if not folder:
        pytest.skip("MANYHANDS_DATA is not set: it must name a folder with mnist/ and text/")
    return Path(folder)
