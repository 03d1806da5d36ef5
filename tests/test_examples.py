"""The examples run as they are, are short, and say what they should."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from repeats import diagonals

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(*command, cwd):
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=cwd, capture_output=True, text=True, check=False, env=one_thread
    )
    assert done.returncode == 0, done.stderr
    return done


def say(name, cwd):
    """What an example prints, line by line; nothing else is printed."""
    done = run(EXAMPLES / name, cwd=cwd)
    assert done.stderr == ""
    return done.stdout.splitlines()


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_is_short_and_says_what_it_shows(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 40
    assert ast.get_docstring(ast.parse(text))


def test_there_are_no_other_examples():
    """Each one is run below."""
    tested = set(re.findall(r'"(\w+\.py)"', Path(__file__).read_text(encoding="utf-8")))
    assert {path.name for path in EXAMPLES.glob("*.py")} == tested


def test_train_in_a_virtual_cluster(tmp_path):
    accuracy, seconds, sent, lag, ahead, steps = say("train_in_a_virtual_cluster.py", tmp_path)
    assert float(accuracy.split()[-1]) > 0.93
    assert re.fullmatch(r"virtual time +0\.\d+ s, [\d,]+ samples/s", seconds)
    assert re.fullmatch(r"sent +\d+ MB", sent)
    assert re.fullmatch(r"lag +\d\.\d updates on average, \d+ at most", lag)
    assert re.fullmatch(r"ahead by +3 steps at most", ahead)
    slow, *others = json.loads(steps.removeprefix("steps by rank"))
    assert slow < min(others)


def test_compare_by_hand(tmp_path):
    heading, *rows = say("compare_by_hand.py", tmp_path)
    assert heading.split() == ["method", "even", "straggler", "waited", "accuracy"]
    cells = {row[:12].strip(): row[12:].split() for row in rows}
    assert list(cells) == ["bsp", "ssp, s = 3", "ad-psgd"]
    straggler = [float(seconds.rstrip("s")) for _, seconds, _, _ in cells.values()]
    assert straggler == sorted(straggler, reverse=True), "the less they wait for each other, the sooner they end"
    assert all(float(even.rstrip("s")) < slow for (even, *_), slow in zip(cells.values(), straggler, strict=True))
    assert all(float(accuracy) > 0.9 for *_, accuracy in cells.values())


def test_study_a_collective(tmp_path):
    _, *rows = say("study_a_collective.py", tmp_path)
    table = {(length, name): (int(rounds), nbytes) for length, name, rounds, nbytes, _, _ in map(str.split, rows)}
    assert len(table) == 8
    for length, all_of_it, least in (("1,000", "12,000", "7,000"), ("1,000,000", "12,000,000", "7,000,000")):
        assert table[length, "tree"] == (6, all_of_it)
        assert table[length, "butterfly"] == (3, all_of_it)
        assert table[length, "ring"] == (14, least)
        assert table[length, "rabenseifner"] == (6, least)


def test_your_own_task(tmp_path):
    lines = say("your_own_task.py", tmp_path)
    assert [line.split(":")[0] for line in lines] == ["bsp", "ssp"]
    for line in lines:
        first, last = re.search(r"loss (\S+) -> (\S+) in \d+ virtual ms", line).groups()
        assert float(last) < float(first) / 10


def test_your_own_task_from_the_command_line(tmp_path):
    command = re.search(r"^manyhands (train .+)$", (EXAMPLES / "your_own_task.py").read_text(encoding="utf-8"), re.M)
    words = [*command[1].split(), "--steps", "100", "--json", "--out", str(tmp_path)]
    answer = json.loads(run("-m", "manyhands.cli", *words, cwd=EXAMPLES).stdout)
    assert answer["method"] == "ssp" and answer["workers"] == 4
    first = json.loads(Path(answer["record"]).read_text(encoding="utf-8").splitlines()[1])
    assert answer["final_loss"] < first["loss"] / 2


def told_apart(printed):
    """Percent; the larger of the two classes has 54, and asynchronous runs end between 92 and 99."""
    return float(
        re.fullmatch(r"(?:\[0\] )?last loss 0\.\d{3}, (\d\d\.\d)% of the points are classified correctly\n", printed)[1]
    )


def test_plain_loop(tmp_path):
    assert told_apart(run(EXAMPLES / "plain_loop.py", cwd=tmp_path).stdout) > 85


LAUNCHERS = {
    "manyhands run": ("manyhands.cli", "run", "-n", "2"),
    "torchrun": ("torch.distributed.run", "--nproc-per-node", "2"),
}


@pytest.mark.parametrize(("name", "launcher"), diagonals(2, ["own_loop.py", "lightning_or_fabric.py"], LAUNCHERS))
def test_own_loop(name, launcher, tmp_path):
    done = run("-m", *LAUNCHERS[launcher], EXAMPLES / name, cwd=tmp_path)
    assert told_apart(done.stdout) > 85, "and the lead alone speaks"
