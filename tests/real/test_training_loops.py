"""The page about training loops: its blocks are one script, which trains with two workers and with one."""

import re
from pathlib import Path

import pytest

import manyhands as mh
from manyhands.report.reading import read

pytestmark = pytest.mark.timeout(180)

PAGE = Path(__file__).resolve().parents[2] / "docs" / "training-loops.md"
LAUNCHERS = {
    "two workers": ("-m", "manyhands.cli", "run", "-n", 2, "--no-prefix", "--out", "record"),
    "one process": (),
}
JOINS = 14
"""How often the page joins."""


@pytest.fixture
def page(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    script = tmp_path / "script.py"
    script.write_text("\n".join(blocks), encoding="utf-8")
    return script


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_blocks_of_the_page_are_a_script_that_trains(launcher, page, start, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, said = start(*LAUNCHERS[launcher], page).ended()
    lines = out.splitlines()
    assert code == 0, said
    accuracies = [float(line.rpartition(" ")[2]) for line in lines if line.startswith(("epoch", "fold"))]
    assert len(accuracies) == 8, "five epochs, printed by the lead only, and three folds"
    assert accuracies[4] > 0.9
    assert [line for line in lines if line.startswith("the last loss is")] == lines[-1:]
    assert mh.load_checkpoint("runs/mine").facts["extra"]["epoch"] == 4
    assert not Path("runs/stopped").exists()
    assert ("job of one worker" in said) == (launcher == "one process")
    if launcher == "two workers":
        recorded_runs(tmp_path / "record")


def recorded_runs(folder):
    """Every join of the page has left a record; that of its section about records has losses and an evaluation."""
    runs = [read(folder if number == 1 else folder / f"join-{number}") for number in range(1, JOINS + 1)]
    assert not (folder / f"join-{JOINS + 1}").exists()
    assert all(run.failure is None and run.workers == 2 for run in runs)
    (ssp,) = (run for run in runs if run.method == "ssp:staleness=3" and run.evaluations)
    assert all(line["loss"] is not None for line in ssp.steps)
