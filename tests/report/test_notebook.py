"""Progress in a notebook: one output of the cell, which is replaced; IPython captures what a front end would get."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.timeout(60)

KERNEL = """
import json
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
shell = InteractiveShell.instance()
shell.kernel = object()  # what a notebook's shell has, and that of a terminal has not
with capture_output() as captured:
    shell.run_cell({cell!r}).raise_error()
shown = [(one.update, one.transient["display_id"], one.data) for one in captured.outputs]
print(json.dumps([shown, captured.stderr]))
"""
BAR = """
from manyhands.report.progress import choose
bar = choose("ssp on <digits>")
bar.step({"kind": "step", "samples": 1, "loss": 0.5})
bar.start(100, "digits")
bar.step({"kind": "step", "samples": 40, "loss": 0.5})
bar.step({"kind": "step", "samples": 60, "loss": 0.5})
bar.stop()
bar.stop()
"""
TABLE = """
from manyhands.report.live import choose
from manyhands.report.reading import RecordedRun
with choose(["bsp", "ssp:rule=<mine>"], 1, None) as table:
    row = table.run("bsp", 0, "")
    row.start(64, "digits")
    row.stop()
    header = {"method": "bsp", "task": "digits", "seed": 0, "workers": 1, "replicas": 1}
    table.done(RecordedRun(header, end={"end": True, "error": "rank 1 <died>", "lost": []}))
"""


@pytest.fixture
def shown(tmp_path, monkeypatch):
    """Run a cell; the outputs that it displays (update, id, data), and its lines on stderr."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))

    def run(cell):
        command = [sys.executable, "-c", KERNEL.format(cell=cell)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=50)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


def is_one_output(outputs):
    """Whether the first output is new and the others replace it."""
    return [update for update, *_ in outputs] == [False] + [True] * (len(outputs) - 1) and len(
        {name for _, name, _ in outputs}
    ) == 1


def test_a_run_has_one_bar_that_ends_full(shown):
    outputs, errors = shown(BAR)
    assert is_one_output(outputs) and errors == ""
    html = [data["text/html"] for *_, data in outputs]
    assert html[0].startswith('<div>ssp on &lt;digits&gt; <progress value="0.0000" max="1"></progress> 0%</div>')
    assert '<progress value="1.0000" max="1"></progress> 100%  loss 0.5000' in html[-1]
    assert outputs[-1][2]["text/plain"].startswith("ssp on <digits>  100%  loss 0.5000")


def test_a_comparison_has_one_table_with_a_row_for_each_method(shown):
    outputs, errors = shown(TABLE)
    assert is_one_output(outputs) and errors == ""
    first, last = (outputs[at][2]["text/html"] for at in (0, -1))
    assert first.count("<tr>") == 3 and "<td>ssp:rule=&lt;mine&gt;</td><td>waits</td>" in first
    assert "<td>bsp</td><td>1 of 1 done</td><td>failed: rank 1 &lt;died&gt;</td>" in last
