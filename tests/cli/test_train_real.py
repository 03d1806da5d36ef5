"""`manyhands train` on real processes: what is printed, how it ends, and how a stopped run is resumed."""

import json
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from manyhands.cli import main
from manyhands.cli.options import RunOptions
from manyhands.cli.train import engine, summary, without
from manyhands.engines.local import Local
from manyhands.runtime.checkpoint import load_checkpoint
from manyhands.virtual.cluster import Cluster

COMMAND = [sys.executable, "-m", "manyhands.cli"]
MORTAL = '''
"""A task that one of its workers does not survive."""

import os
import signal

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import manyhands as mh


class Mortal(nn.Linear):
    passes = 0

    def forward(self, x):
        self.passes += 1
        if self.passes == 5:
            try:
                os.close(os.open("dead", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return super().forward(x)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)


def network():
    return Mortal(1, 1)


def task():
    x = torch.linspace(-1, 1, 64).unsqueeze(1)
    return mh.Task(model=network, data=TensorDataset(x, 2 * x), loss=mse_loss, batch_size=4, epochs=4, name="mortal")
'''


@pytest.fixture
def mortal(manyhands, tmp_path):
    (tmp_path / "mortal.py").write_text(MORTAL)
    return lambda *words: manyhands("train", *words, "--task", "mortal:task")


def test_two_processes_train_if_nothing_else_is_said(manyhands, tmp_path):
    done = manyhands("train", "bsp", "--steps", 8, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["world"], result["link"], result["workers"], result["servers"]) == ("real", "shm", 2, 0)
    header, *rest, _ = map(json.loads, (tmp_path / result["record"]).read_text().splitlines())
    steps = [line for line in rest if "loss" in line]
    assert (header["world"], header["link"]) == ("real", "shm")
    assert sorted((line["rank"], line["step"]) for line in steps) == [(r, s) for r in (0, 1) for s in range(1, 9)]
    assert done.stderr.startswith("bsp on digits: 512 samples\n") and "100 %" in done.stderr.splitlines()[-1]


def test_options_reach_the_processes(manyhands, tmp_path):
    words = ("--workers", 1, "--servers", 1, "--link", "tcp", "--out", "here")
    done = manyhands("train", "ssp", *words, "--steps", 8, "--checkpoint-every", 4)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ssp on digits: 1 workers, 1 servers, link tcp, seed 0\n")
    assert " seconds (" in done.stdout and "virtual" not in done.stdout
    assert [path.name for path in sorted((tmp_path / "here/checkpoints").iterdir())] == [
        "step-00000004",
        "step-00000008",
    ]
    again = manyhands("train", "ssp", "--workers", 1, "--steps", 10, "--resume", "here", "--json")
    lines = (tmp_path / json.loads(again.stdout)["record"]).read_text().splitlines()
    assert [line["step"] for line in map(json.loads, lines) if "loss" in line] == [9, 10], "only the rest was trained"


def test_a_run_that_continues_without_a_worker_ends_with_0_and_names_it(mortal):
    done = mortal("ssp", "--lr", 0.01)
    assert done.returncode == 0, done.stderr
    lost = re.search(r"^  lost rank ([01]): (it was killed by SIGKILL)$", done.stdout, re.MULTILINE)
    assert f"manyhands: rank {lost[1]} is lost: {lost[2]}\n" in done.stderr, "it is said when it happens"


def test_a_loss_that_ends_the_run_is_said_once_and_ends_it_with_3(mortal):
    done = mortal("bsp", "--lr", 0.01)
    assert (done.returncode, done.stdout) == (3, "")
    assert len(re.findall(r"^manyhands: rank [01] is lost: it was killed by SIGKILL$", done.stderr, re.MULTILINE)) == 1
    assert "Traceback" not in done.stderr


@pytest.fixture
def training(tmp_path):
    """A long run of which a tenth is done."""
    words = [*COMMAND, "train", "bsp:lr=0.05", "--steps", "8000", "--batch-size", "4", "--json"]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stderr=pipe, stdout=pipe, text=True, cwd=tmp_path) as running:
        for line in running.stderr:
            if line.startswith(" 10 %"):
                break
        yield running
        running.kill()


def test_sigterm_stops_and_saves_and_prints_how_to_resume(training, manyhands, tmp_path):
    training.terminate()
    out, err = training.communicate()
    assert training.returncode == 143, err
    step, saved, command = re.fullmatch(
        r"manyhands: stopped at step (\d+), saved in (\S+); to resume: manyhands (.+)", err.splitlines()[-1]
    ).groups()
    result = json.loads(out)
    assert 800 <= result["stopped_at"] == int(step) < 8000
    assert load_checkpoint(tmp_path / saved).facts["step"] == int(step)
    words = shlex.split(command)
    run = Path(result["record"]).parent
    assert words == shlex.split(f"train bsp:lr=0.05 --steps 8000 --batch-size 4 --json --resume {run}")
    words[words.index("--steps") + 1] = str(int(step) + 2)  # the rest would take a while
    again = manyhands(*words)
    assert again.returncode == 0, again.stderr
    lines = (tmp_path / json.loads(again.stdout)["record"]).read_text().splitlines()
    assert {line["step"] for line in map(json.loads, lines) if "loss" in line} == {int(step) + 1, int(step) + 2}


def test_ctrl_c_saves_and_ends_with_130(training):
    training.send_signal(signal.SIGINT)
    out, err = training.communicate()
    assert training.returncode == 130 and json.loads(out)["stopped_at"] >= 800
    assert re.match(r"manyhands: stopped at step \d+, saved in \S+; to resume: manyhands", err.splitlines()[-1])
    assert "Traceback" not in err


def test_ctrl_c_in_virtual_time_ends_at_once(monkeypatch, tmp_path, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("manyhands.virtual.kernel.Kernel.run", interrupted)
    assert main(["train", "bsp", "--virtual", "--steps", "4"]) == 130
    assert capsys.readouterr().err.splitlines()[-2:] == ["manyhands: nothing was saved", "manyhands: interrupted"]


def test_options_give_the_engine():
    assert engine(RunOptions()) == Local(workers=2)
    given = {"workers": 3, "servers": 1, "link": "tcp", "bind": "127.0.0.2", "spares": 1, "join_timeout": 5.0}
    assert engine(RunOptions(**given)) == Local(**given)
    assert engine(RunOptions(virtual=True, workers=8)) == Cluster(workers=8)


@pytest.mark.parametrize(
    "words", [["ssp", "--resume", "old", "--json"], ["ssp", "--resume=old", "--json"], ["ssp", "--json"]]
)
def test_the_command_to_resume_resumes_once(words):
    assert without("--resume", words) == ["ssp", "--json"]


def test_the_summary_of_a_stopped_run_says_so():
    said = {"method": "ssp", "task": "digits", "seed": 0, "workers": 2, "servers": 0, "world": "real", "link": "shm"}
    unknown = dict.fromkeys(("test_accuracy", "final_loss", "mean_lag", "max_lag", "record"))
    numbers = dict.fromkeys(("seconds", "wall_seconds", "samples_per_second", "bytes_sent", "waited_seconds"), 1)
    facts = {**said, **unknown, **numbers, "steps": 4000, "stopped_at": 20, "lost": [(1, "it died")]}
    text = summary(facts)
    assert "stopped before step 4,000" in text and text.endswith("\n  lost rank 1: it died")
