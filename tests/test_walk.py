"""`make walk` prints what runs in every step, what runs in some steps only, and how many files these are."""

import re
import subprocess
import sys
from pathlib import Path

WALK = Path(__file__).parent / "walk.py"


def test_the_walk_of_ssp_lists_its_files_and_counts_them():
    done = subprocess.run([sys.executable, WALK, "ssp"], capture_output=True, text=True, timeout=120, check=True)
    always, sometimes = done.stdout.split("in some steps only:\n")
    assert always.startswith("in every step:\n")
    counts = re.findall(r"^ +(\d+\.\d\d)  \S+$", always, re.MULTILINE)
    assert counts and all(float(count) >= 0.5 for count in counts)
    assert all(float(count) <= 0.5 for count in re.findall(r"^ +(\d+\.\d\d)  \S+$", sometimes, re.MULTILINE))
    files = re.findall(r"^ *\d+ (\S+\.py)$", always, re.MULTILINE)
    more = re.findall(r"^ *\d+ (\S+\.py)$", sometimes, re.MULTILINE)
    assert {"strategies/server.py", "servers/shard.py", "core/weight_slice.py"} <= {*files}
    *_, last = done.stdout.splitlines()
    assert last.startswith(f"ssp on shm: {len(files)} files ({len({*files, *more})}), {len(counts)} functions (")
