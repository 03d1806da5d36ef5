"""`manyhands report` as its users see it."""

import json

import pytest

from manyhands.cli import main
from synthetic_runs import lines


@pytest.fixture
def runs(tmp_path):
    """Two whole runs and one that was cut short."""
    for name in ("ssp", "bsp", "cut"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        text = "".join(json.dumps(line) + "\n" for line in lines(method=name))
        (tmp_path / "runs" / name / "record.jsonl").write_text(text[: -400 if name == "cut" else None])
    return tmp_path / "runs"


def test_a_folder_of_runs_becomes_one_page(manyhands, runs, tmp_path):
    done = manyhands("report", "runs", "--out", "out", "--target", "accuracy=0.9")
    assert (done.returncode, done.stdout) == (0, "out/report.html\n")
    assert "runs/cut/record.jsonl: the record has no last line" in done.stderr
    assert (tmp_path / "out" / "report.html").is_file()


def test_json_says_where_and_what(manyhands, runs):
    done = manyhands("report", "runs/ssp", "runs/bsp/record.jsonl", "--json")
    facts = json.loads(done.stdout)
    assert [row["method"] for row in facts["runs"]] == ["ssp", "bsp"]
    assert facts["report"].startswith("runs/report-")
    assert done.stderr == ""


def test_what_is_there_is_not_written_over(manyhands, runs, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("precious")
    refused = manyhands("report", "runs", "--out", "out")
    assert refused.returncode == 2
    assert refused.stderr == (
        "manyhands: out is not empty, but must be a new folder: --force (force=True) writes into it all the same\n"
    )
    assert manyhands("report", "runs", "--out", "out", "--force").returncode == 0
    assert (tmp_path / "out" / "mine").read_text() == "precious"


def test_unreadable_records_are_left_out(manyhands, runs):
    (runs / "cut" / "record.jsonl").write_text('{"format": 99, "participants": []}\n')
    done = manyhands("report", "runs", "--out", "out", "--json")
    assert len(json.loads(done.stdout)["runs"]) == 2
    assert "left out: runs/cut/record.jsonl has format 99" in done.stderr
    alone = manyhands("report", "runs/cut")
    assert alone.returncode == 2
    assert "there is no record to report" in alone.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "cannot read the record nowhere: No such file"),
        (["runs", "--target", "speed=1"], "there is no measure for a target 'speed'"),
        (["runs", "--out", "runs/ssp/record.jsonl"], "is a file, but must be a folder"),
        ([], "manyhands report --help"),
    ],
)
def test_bad_usage_is_refused(manyhands, runs, words, said):
    done = manyhands("report", *words)
    assert done.returncode == 2
    assert said in done.stderr


def test_help_has_examples(manyhands):
    assert "manyhands report runs --out runs/all --target accuracy=0.95" in manyhands("report", "--help").stdout


def test_without_a_browser_the_page_is_there_all_the_same(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("BROWSER_PATH", str(tmp_path / "chromium"))
    page = tmp_path / "out" / "report.html"
    assert main(["report", str(runs / "ssp"), "--out", str(page.parent), "--png"]) == 1
    said = capsys.readouterr()
    assert said.out == f"{page}\n"
    assert "install Chromium" in said.err
    assert page.is_file()
