"""Benchmarks are found by their files and held against their goals."""

import json
import signal
import sys

import pytest

from manyhands.cli import bench, main
from manyhands.report.progress import ProgressLines

SOURCE = '''"""How fast nothing is.

More about it."""


def run(progress):
    progress.start(1, "nothing")
    return [
        {"name": "nothings", "value": 3.0, "goal": ">= 2"},
        {"name": "seconds", "value": 3.0, "goal": "< 2", "unit": "s"},
        {"name": "color", "value": "blue"},
    ]
'''


@pytest.fixture
def package(tmp_path, monkeypatch):
    for folder in (tmp_path / "benchmarks", tmp_path / "src" / "manyhands"):
        folder.mkdir(parents=True)
    (tmp_path / "benchmarks" / "nothing.py").write_text(SOURCE)
    (tmp_path / "benchmarks" / "_shared.py").write_text("")
    found = bench.benchmarks(tmp_path / "src" / "manyhands")
    monkeypatch.setattr(bench, "benchmarks", lambda package=None: found)
    return tmp_path / "src" / "manyhands"


def test_they_are_inside_an_installed_package_or_beside_its_source(tmp_path):
    package = tmp_path / "src" / "manyhands"
    for folder in (tmp_path / "benchmarks", package / "benchmarks"):
        folder.mkdir(parents=True)
        (folder / f"in_{folder.parent.name}.py").write_text(SOURCE)
    assert list(bench.benchmarks(package)) == ["in_manyhands"]
    (package / "benchmarks" / "in_manyhands.py").unlink()
    (package / "benchmarks").rmdir()
    assert list(bench.benchmarks(package)) == [f"in_{tmp_path.name}"]


def test_goals(package):
    results = bench.measure(bench.benchmarks()["nothing"], ProgressLines())
    assert [result["met"] for result in results] == [True, False, None]


def test_a_benchmark_finds_what_it_shares_with_others(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "_shared_by_two.py").write_text("VALUE = 7\n")
    sharing = "from _shared_by_two import VALUE\ndef run(progress):\n    return [{'name': 'n', 'value': VALUE}]\n"
    for name in ("one.py", "two.py"):
        (tmp_path / name).write_text(sharing)
        assert bench.measure(tmp_path / name, ProgressLines()) == [{"name": "n", "value": 7, "met": None}]
    assert sys.path.count(str(tmp_path)) == 1 and sys.path[-1] == str(tmp_path)


STOPPED = """import os, pathlib, signal
def run(progress):
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        return [{"name": "n", "value": 7}]
    finally:
        pathlib.Path(__file__).with_suffix(".tidy").touch()
"""


def test_one_that_is_asked_to_stop_tidies_up(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "stopped.py").write_text(STOPPED)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        bench.measure(tmp_path / "stopped.py", ProgressLines())
    assert ended.value.code == 143
    assert (tmp_path / "stopped.tidy").exists()
    assert signal.getsignal(signal.SIGTERM) is before


def test_as_json(package, capsys):
    assert main(["bench", "nothing", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["bench"] == "nothing" and said["machine"]["cores"] >= 1
    assert said["results"][1] == {"name": "seconds", "value": 3.0, "goal": "< 2", "unit": "s", "met": False}


def test_as_a_table(package, capsys):
    assert main(["bench", "nothing"]) == 0
    out = capsys.readouterr().out
    assert "nothings" in out and "met" in out and "missed" in out


def test_alone_it_lists_them(package, capsys):
    assert main(["bench"]) == 0
    assert "How fast nothing is." in capsys.readouterr().out
    assert main(["bench", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [{"name": "nothing", "about": "How fast nothing is."}]


def test_a_wrong_name_is_refused(package, capsys):
    assert main(["bench", "nuthing"]) == 2
    assert "did you mean nothing?" in capsys.readouterr().err
