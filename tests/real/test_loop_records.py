"""Records of scripts: `manyhands run --out` and `manyhands compare METHOD... -- script.py`, with real processes."""

import json

import pytest

from manyhands.report.reading import read, records

pytestmark = pytest.mark.timeout(240)

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
BEGIN = """
import sys
import torch
import manyhands as mh
from torch.optim import SGD
from torch.utils.data import DataLoader
from real.tools import net, small
task = small()
torch.manual_seed(0)

def error(model):
    x, y = task.data.tensors
    with torch.no_grad():
        return task.loss(model(x), y).item()
"""
PREPARED = """
for fold in range({joins}):
    hands = mh.join({method})
    model = net()
    model, optimizer, loader = hands.prepare(model, SGD(model.parameters(), 0.05), DataLoader(task.data, 4))
    for epoch in range(2):
        for x, y in loader:
            loss = task.loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            hands.record(loss=loss)
        hands.record(accuracy=1 / (1 + hands.evaluate(error)), epoch=epoch)
        {inside}
    hands.end()
"""
STEPPED = """
model = net()
with mh.join(model, loss=task.loss, {method}) as hands:
    for x, y in hands.share(task.data, 4, steps=6):
        hands.step(x, y)
hands.record(accuracy=1 / (1 + error(model)), after=hands.rank)
"""


@pytest.fixture
def script(tmp_path):
    """A script in a folder of its own."""

    def write(form, **fields):
        path = tmp_path / "script.py"
        path.write_text(BEGIN + form.format(**{"method": "'bsp'", "inside": "pass", "joins": 1, **fields}))
        return path

    return write


@pytest.fixture
def run(start, tmp_path):
    """Run a script of two workers with a record: the exit code, stderr and the runs that were recorded."""

    def call(script, *words, **environment):
        out = tmp_path / "out"
        code, _, said = start(
            "-m", "manyhands.cli", "run", "-n", 2, "--out", out, *words, script, **environment
        ).ended()
        return code, said.splitlines(), [read(path) for path in records(out)] if out.exists() else []

    return call


def test_a_loop_that_is_left_as_it_is_has_a_record_that_reports_read(script, run, start, tmp_path):
    code, said, (found,) = run(script(PREPARED))
    assert (code, said) == (0, [])
    assert (found.method, found.task, found.workers, found.failure) == ("bsp", "script.py", 2, None)
    assert [(line["rank"], line["loss"] is None) for line in found.steps].count((0, False)) == 12
    assert len(found.steps) == 24 and len(found.pauses) == 4 and set(found.memory) == {0, 1}
    assert [line["evaluated"] for line in found.evaluations] == [6, 12]
    assert [line["values"]["epoch"] for line in found.numbers if line["rank"] == 0] == [0, 1]
    assert found.end["samples"] == 96 and len(found.end["weights_sha256"]) == 64
    code, *_ = start("-m", "manyhands.cli", "report", tmp_path / "out", "--out", tmp_path / "page").ended()
    assert code == 0 and (tmp_path / "page" / "report.html").is_file()


def test_another_method_is_chosen_from_outside_and_one_line_says_so(script, run):
    code, said, (found,) = run(script(PREPARED), "--method", "ssp:staleness=2", "--servers", 1, MANYHANDS_SEED="3")
    assert (code, said) == (0, ["[0] manyhands: --method ssp:staleness=2 replaces the script's own, bsp"])
    assert (found.method, found.header["servers"], found.seed) == ("ssp:staleness=2", 1, 3)
    assert found.end["bytes_sent"] > max(line["bytes"] for line in found.steps), "those of the server count, too"


def test_an_accuracy_after_the_end_of_training_is_the_result(script, run):
    code, said, (found,) = run(script(STEPPED, method=""), "--method", "ssp")
    assert (code, said) == (0, [])
    assert found.header["steps"] == 6 and len(found.steps) == 12
    assert 0 < found.end["test_accuracy"] < 1 and not found.evaluations
    assert [line["values"]["after"] for line in sorted(found.numbers, key=lambda one: one["rank"])] == [0, 1]


def test_a_run_that_fails_is_recorded_with_the_reason(script, run):
    code, _, (found,) = run(script(PREPARED, inside="if hands.rank == 1: 1 / 0"))
    assert code == 1
    assert found.failure == "rank 1 failed: ZeroDivisionError: division by zero"
    assert len([line for line in found.steps if line["rank"] == 1]) == 6


def test_every_join_has_a_record_of_its_own(script, run, tmp_path):
    code, _, found = run(script(PREPARED, joins=2))
    assert code == 0
    assert [one.path.parent for one in found] == [tmp_path / "out", tmp_path / "out" / "join-2"]
    assert [(one.failure, len(one.steps)) for one in found] == [(None, 24)] * 2


def test_methods_are_compared_on_a_script_and_one_that_fails_stays_in_the_table(script, start, tmp_path):
    words = ["bsp", "ssp:staleness=2", "gpipe", "--out", tmp_path / "all", "--target", "accuracy=0.2", "--json"]
    script = script(PREPARED, inside="print('epoch', epoch, sys.argv[1:])")
    code, out, _ = start("-m", "manyhands.cli", "compare", *words, "--", script, "--debug").ended(220)
    assert code == 0
    found = json.loads(out)
    rows = {row["method"]: row for row in found["ranking"]}
    assert found["task"] == "script.py" and set(rows) == {"bsp", "ssp:staleness=2", "gpipe"}
    assert [rows[name]["reached"] for name in ("bsp", "ssp:staleness=2", "gpipe")] == [1, 1, 0]
    assert found["ranking"][-1]["failure"].startswith("gpipe cannot be trained by a loop that calls backward()")
    assert (tmp_path / "all" / "report.html").is_file()
    log = (tmp_path / "all" / "ssp-staleness=2" / "seed-0" / "rank0.log").read_text()
    assert "epoch 1 ['--debug']" in log and "--method ssp:staleness=2 replaces the script's own, bsp" in log


def test_torchrun_passes_a_method_on_and_keeps_no_record(script, start, tmp_path):
    path = script(STEPPED + "print(hands._strategy.recipe)", method="strategy='bsp'")
    code, out, _ = start(*TORCHRUN, path, MANYHANDS_METHOD="easgd").ended()
    assert code == 0 and out.count("easgd") == 2
    assert not list(tmp_path.rglob("record.jsonl"))
