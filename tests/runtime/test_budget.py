"""Budgets in shared memory: a run may have thousands of them, and few open files."""

import os
import subprocess
import sys

TIME_LIMIT = 120
FILES = 96
"""Open files that a process may have; the ranks below need about half of them."""
BUDGETS = 150

TRAIN = f"""
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, ({FILES}, {FILES}))

import torch
from torch import nn
from torch.utils.data import TensorDataset
import manyhands as mh

def task():
    x = torch.linspace(-1, 1, 32).unsqueeze(1)
    return mh.Task(lambda: nn.Linear(1, 1), TensorDataset(x, x), nn.functional.mse_loss, batch_size=4)

if __name__ == "__main__":
    result = mh.train("tasks_here:task", mh.ssp(), workers=2, steps={BUDGETS}, checkpoint_every=1, out="out")
    print(len([line for line in result.records if line["kind"] == "pause"]))
"""

SHARES = f"""
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, ({FILES}, {FILES}))

import torch
from torch import nn
from torch.utils.data import TensorDataset
import manyhands as mh

x = torch.linspace(-1, 1, 32).unsqueeze(1)
taken = 0
with mh.join(nn.Linear(1, 1), strategy=mh.ssp(), loss=nn.functional.mse_loss) as hands:
    for _ in range({BUDGETS}):
        for batch in hands.share(TensorDataset(x, x), batch_size=16):
            hands.step(*batch)
            taken += 1
print("steps", taken)
"""


def run(folder, text, *before):
    """Run a script in a folder of its own; what it printed."""
    (folder / "tasks_here.py").write_text(text)
    words = [sys.executable, *before, "tasks_here.py"]
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIME_LIMIT)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_segments_need_no_open_file_each(tmp_path):
    assert run(tmp_path, TRAIN) == [str(2 * BUDGETS)]


def test_shares_of_an_own_loop_need_no_open_file_each(tmp_path):
    printed = run(tmp_path, SHARES, "-m", "manyhands.cli", "run", "--no-prefix", "-n", "2")
    assert sum(map(int, printed[1::2])) == 2 * BUDGETS
