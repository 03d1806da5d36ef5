"""What a user sees of `manyhands compare`: a ranking, a report, failures that stay in the table, one-line refusals."""

import json
import os
import pty
import signal
import subprocess
import sys
import time

import pytest

from manyhands.report.measures import Target
from report.written import header, step

COMMAND = [sys.executable, "-m", "manyhands.cli"]
FEW = ("--virtual", "--workers", "4", "--epochs", "4", "--evaluations", "5")


def refused(done, *says):
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("manyhands: ") and done.stderr.count("\n") == 1
    for words in says:
        assert words in done.stderr


def test_methods_are_ranked_and_reported(manyhands, tmp_path):
    done = manyhands(
        "compare", "bsp", "ssp:staleness=2", *FEW, "--target", "accuracy=0.5", "--seeds", "2", "--out", "it"
    )
    assert done.returncode == 0
    table = done.stdout.splitlines()
    assert "time to target" in done.stdout and table[-1] == "report: it/report.html"
    assert {line.split()[1] for line in table if line.strip()[:1] in ("1", "2")} == {"bsp", "ssp:staleness=2"}
    assert (tmp_path / "it" / "report.html").stat().st_size > 1_000_000
    for method in ("bsp", "ssp-staleness=2"):
        for seed in (0, 1):
            assert (tmp_path / "it" / method / f"seed-{seed}" / "record.jsonl").is_file()
    said = done.stderr.splitlines()
    assert len(said) == 4 and said[0].startswith("bsp, seed 0: loss ") and "time to target" in said[0]


def test_json_is_one_object_and_nothing_else(manyhands):
    done = manyhands("compare", "easgd", "diloco:period=5", *FEW, "--target", "accuracy=0.4", "--json", "--out", "it")
    told = json.loads(done.stdout)
    assert told["task"] == "digits" and told["target"] == {"what": "accuracy", "value": 0.4}
    assert [row["rank"] for row in told["ranking"]] == [1, 2]
    assert {row["method"] for row in told["ranking"]} == {"easgd", "diloco:period=5"}
    for row in told["ranking"]:
        assert row["samples_per_second"] > 0 and row["memory"] > 0 and row["failure"] is None
    assert told["report"] == "it/report.html" and len(told["records"]) == 2


def test_a_method_that_fails_stays_in_the_table_with_the_reason(manyhands):
    done = manyhands("compare", "bsp", "ssp:lr=1e9", *FEW, "--out", "it")
    assert done.returncode == 0
    assert "ssp:lr=1e9 failed: the loss is" in done.stdout and "training diverged" in done.stdout
    assert done.stdout.count("failed") == 2, "in the table, and below it with the reason"


def test_if_all_fail_so_does_the_command(manyhands):
    done = manyhands("compare", "ssp:lr=1e9", *FEW, "--out", "it")
    assert done.returncode == 1 and "failed" in done.stdout


def test_rates_are_tuned_with_the_same_budget_and_it_is_said(manyhands):
    done = manyhands("compare", "bsp:lr=30", "easgd", *FEW, "--tune", "--json", "--out", "it")
    told = json.loads(done.stdout)
    assert "same budget" in told["notes"][0] and "bsp:lr=30 9" in told["notes"][0]
    assert sum("(tuning)" in line for line in done.stderr.splitlines()) == 6


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), ["name the methods first"]),
        (("bsp", "sssp"), ["sssp", "ssp"]),
        (("bsp", "ssp:slack=3"), ["slack", "staleness"]),
        (("bsp", "ssp:staleness=-1"), ["staleness is -1, but must be >= 0"]),
        (("bsp", "bsp"), ["named twice"]),
        (("bsp", "--target", "speed=9"), ["speed", "accuracy, loss"]),
        (("bsp", "--target", "accuracy=95"), ["95", "<= 1"]),
        (("bsp", "--seeds", "0"), ["seeds is 0, but must be >= 1"]),
        (("bsp", "--cluster", "nowhere.toml"), ["nowhere.toml"]),
        (("bsp", "--"), ["the script is missing after --"]),
        (("bsp", "--", "nowhere.py"), ["there is no script nowhere.py"]),
        (("--", "nowhere.py"), ["name the methods first"]),
        (("bsp", "--task", "mnist", "--", "x.py"), ["--task", "left out", "the script is the task"]),
        (("bsp", "--cluster=c.toml", "--", "x.py"), ["--cluster", "left out", "real processes"]),
        (("bsp", "--virtual", "--", "x.py"), ["--virtual", "left out", "real processes"]),
        (("bsp", "--epochs", "3", "--", "x.py"), ["--epochs", "left out", "the script decides"]),
        (("bsp", "--batch_size", "3", "--", "x.py"), ["--batch-size", "left out", "the script decides"]),
        (("bsp", "--tune", "--", "x.py"), ["--tune", "left out", "learning rates"]),
        (("bsp", "--evaluations", "3", "--", "x.py"), ["--evaluations", "hands.record(accuracy=...)"]),
    ],
)
def test_nonsense_is_refused_in_one_line(manyhands, words, says):
    refused(manyhands("compare", *words), *says)


def test_a_folder_with_something_in_it_is_not_written_over(manyhands, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "precious.txt").write_text("keep me")
    refused(manyhands("compare", "bsp", *FEW, "--out", "mine"), "mine is not empty", "--force")
    assert manyhands("compare", "bsp", *FEW, "--out", "mine", "--force").returncode == 0
    assert (tmp_path / "mine" / "precious.txt").read_text() == "keep me"
    assert (tmp_path / "mine" / "report.html").is_file()


def test_help_has_examples(manyhands):
    done = manyhands("compare", "--help")
    assert done.returncode == 0 and "examples:" in done.stdout and "--target" in done.stdout


@pytest.mark.timeout(90)
def test_ctrl_c_stops_real_processes_too(tmp_path):
    words = ["compare", "bsp", "ssp", "--workers", "2", "--epochs", "5000", "--out", "it"]
    said = tmp_path / "said"
    with said.open("w") as stderr:
        running = subprocess.Popen([*COMMAND, *words], cwd=tmp_path, stderr=stderr)
    record = tmp_path / "it" / "bsp" / "seed-0" / "record.jsonl"
    ends = time.monotonic() + 60
    while not (record.exists() and record.stat().st_size > 10_000) and time.monotonic() < ends:
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    assert running.wait(20) == 130
    assert "interrupted" in said.read_text()
    assert json.loads(record.read_text().splitlines()[-1])["error"] == "interrupted"


# -- the table while it runs ------------------------------------------------------------------------


def test_a_terminal_shows_a_table_that_fills(tmp_path):
    main, side = pty.openpty()
    words = ["compare", "bsp", "easgd", *FEW, "--out", "it"]
    environment = {**os.environ, "COLUMNS": "140", "LINES": "40", "NO_COLOR": "1"}
    running = subprocess.Popen(
        [*COMMAND, *words], cwd=tmp_path, stderr=side, stdout=subprocess.DEVNULL, env=environment
    )
    os.close(side)
    seen = b""
    try:
        while part := os.read(main, 65536):
            seen += part
    except OSError:  # the other end is closed
        pass
    assert running.wait(60) == 0
    text = seen.decode(errors="replace")
    for column in ("method", "loss", "accuracy", "samples/s", "bytes", "lag", "waiting", "time to target"):
        assert column in text
    assert "waits" in text and "1 of 1 done" in text


def test_a_row_counts_the_lines_it_gets():
    from manyhands.report.live import Row

    row = Row("bsp", 2, Target("accuracy", 0.5), None)
    assert row.cells()[:2] == ["bsp", "waits"]
    row.begin("").start(128, "digits")
    row.step({**step(0, 1, 0.0, 2.0, loss=1.0, bytes=1000, wait=0.5), "samples": 32})
    row.step({"kind": "evaluation", "evaluated": 1, "time": 3.0, "accuracy": 0.75, "samples": 0})
    row.step({**step(1, 1, 0.0, 4.0, loss=2.0, bytes=3000, lag=2, wait=1.0), "samples": 32})
    name, state, loss, accuracy, rate, sent, lag, waiting, reached = row.cells()
    assert (name, state, loss, accuracy) == ("bsp", "1 of 2, 50%", "1.1000", "0.7500")
    assert (rate, sent, lag, waiting, reached) == ("16", "4 kB", "1", "25 %", "3 s")
    assert header()["format"] == 3
