"""Cells of a notebook: real workers train what they define. IPython runs them as the kernel of a notebook does."""

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(120)

PAGE = Path(__file__).resolve().parents[2] / "docs" / "notebooks.md"

TASK = """
import json, sys
import torch
from torch import nn
import manyhands as mh

WIDTH = 8

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.out = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x):
        return self.out(torch.tanh(self.hidden(x)))

class Points(torch.utils.data.Dataset):
    def __init__(self):
        self.x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.x[i, :2]

def error(outputs, targets):
    return ((outputs - targets) ** 2).mean()

def slower(samples):
    return 0.3 / (1 + samples / 64)

task = mh.Task(model=Net, data=Points(), loss=error, batch_size=4)
"""
TRAIN = """
method = mh.bsp(rule=mh.rules.Sgd(slower))
real = mh.train(task, method, workers=2, steps=20, progress=True)
virtual = mh.train(task, method, on=mh.Cluster(workers=2), steps=20)
print(json.dumps([real.weights_sha256, virtual.weights_sha256]))
"""
KERNEL = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
for cell in {cells!r}:
    shell.run_cell(cell).raise_error()
"""


@pytest.fixture
def run(tmp_path):
    """Run a program in a folder of its own; the lines that it prints, and those on stderr."""

    def begin(*words, **more):
        command = [sys.executable, *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, **more)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines(), done.stderr.splitlines()

    return begin


@pytest.fixture
def cells(run, tmp_path, monkeypatch):
    """Run cells one after the other; the lines that they print, and those on stderr."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))

    def begin(*texts):
        kernel = tmp_path / "kernel.py"
        kernel.write_text(KERNEL.format(cells=[textwrap.dedent(text) for text in texts]))
        return run(kernel)

    return begin


def test_real_workers_train_what_a_cell_defines_to_the_same_weights(cells):
    printed, progress = cells(TASK, TRAIN)
    real, virtual = json.loads(printed[-1])
    assert real == virtual
    assert progress[0] == "bsp on task: 160 samples" and progress[-1].startswith("100 %")


def test_methods_are_compared_on_a_task_of_a_cell_and_a_result_shows_itself(cells):
    compare = "found = mh.compare(task, [mh.bsp(), mh.ssp()], workers=2, steps=8)"
    printed, _ = cells(TASK, compare, "print(sorted((row['method'], row['failure']) for row in found.rows))", "found")
    assert printed[0] == "[('bsp', None), ('ssp', None)]"
    assert "<Comparison: 2 methods on task>" in printed, "the last value of a cell is shown by its repr"


def test_what_a_cell_cannot_send_is_refused_and_the_named_way_works(cells):
    refused = """
    import threading
    lock = threading.Lock()
    def guarded():
        with lock:
            return Net()
    try:
        mh.train(mh.Task(guarded, Points(), loss=error), mh.bsp(), workers=2, steps=2)
    except mh.Refused as reason:
        print(reason)
    """
    named = "print(mh.train('my_task:function', mh.bsp(), workers=2, steps=2).steps)"
    function = "def function():\n    return mh.Task(guarded, Points(), loss=error)\n"
    guarded = "import threading\nlock = threading.Lock()\ndef guarded():\n    with lock:\n        return Net()\n"
    printed, _ = cells(TASK, refused, f"%%writefile my_task.py\n{TASK}\n{guarded}\n{function}", named)
    assert "cannot pickle '_thread.lock' object" in printed[0] and "%%writefile my_task.py" in printed[0]
    assert (printed[1], printed[-1]) == ("Writing my_task.py", "2")


def test_a_program_on_standard_input_trains_with_real_workers(run):
    printed, _ = run("-", input=TASK + TRAIN)
    real, virtual = json.loads(printed[-1])
    assert real == virtual


def test_a_loop_in_a_cell_is_a_job_of_one_worker(cells):
    loop = """
    with mh.join(Net(), loss=error, strategy=mh.bsp()) as hands:
        print(hands.workers, sum(1 for batch in hands.share(Points(), batch_size=4) if hands.step(*batch) is not None))
    """
    printed, said = cells(TASK, loop)
    assert printed == ["1 16"]
    assert said == [
        "manyhands: no launcher, so this is a job of one worker; `manyhands run -n 4 script.py` starts four"
    ]


def test_the_cells_of_the_page_on_notebooks_work(cells, monkeypatch):
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    page = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    checks = "assert len(ranking) == 2 and len(each_run) == 2 and set(steps['rank']) == {0, 1}"
    printed, _ = cells(*page[:2], checks, *page[2:])
    assert len(page) == 6
    assert sum("Result: " in line for line in printed) == 2, "that of the first cell and that of the named task"
    assert sorted(line[-13:] for line in printed[-2:]) == ["worker 0 of 2", "worker 1 of 2"]
