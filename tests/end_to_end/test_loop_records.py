"""The record of a user's own loop in virtual time: its lines, and the numbers that the loop adds."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import mse_loss
from torch.optim import SGD
from torch.utils.data import DataLoader

import manyhands as mh
from manyhands import Refused
from manyhands.core.record import encoded
from manyhands.report.adapters import Scalars
from manyhands.report.measures import Target, totals
from manyhands.report.reading import of_lines
from manyhands.report.record import FORMAT
from manyhands.run import compare_scripts, script_record
from manyhands.run.compare_scripts import notes_on
from manyhands.run.join import Hands
from manyhands.run.script_record import JoinRecord, ScriptFailed, ScriptRecord
from manyhands.virtual.budget import VirtualSharedBudget
from manyhands.virtual.world import simulate

from .small import model, task

DATA = task(samples=42).data
STEPS = 6


def run(strategy, loop, *, workers=2, servers=0, own=False):
    """What every rank writes, in rank order, in a loop `loop(hands, net)`; `own`: with `backward` of its own."""

    budget = VirtualSharedBudget(STEPS * workers)

    def program(transport):
        torch.manual_seed(0)
        net, lines = model(), []
        given = {} if own else {"model": net, "loss": mse_loss, "budget_for": lambda batches: budget}
        with Hands(transport, strategy=strategy, observe=lines.append, **given) as hands:
            loop(hands, net)
        return lines

    return simulate(mh.Cluster(workers=workers, servers=servers), program).results


def stepped(hands, net):
    for x, y in hands.share(DATA, 4, steps=STEPS):
        hands.step(x, y)


def prepared(after=lambda hands, loss, step: None, between=lambda hands, loss, step: None):
    """A loop with a backward pass of its own; the functions are called in each step, before and after the optimizer."""

    def loop(hands, net):
        net, optimizer, loader = hands.prepare(net, SGD(net.parameters(), 0.05), DataLoader(DATA, 4))
        for step, (x, y) in enumerate(loader):
            loss = mse_loss(net(x), y)
            loss.backward()
            between(hands, loss, step)
            optimizer.step()
            optimizer.zero_grad()
            after(hands, loss, step)

    return loop


def of_kind(lines, kind):
    return [line for line in lines if line["kind"] == kind]


def losses(lines):
    return [line["loss"] for line in of_kind(lines, "step")]


# -- lines -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [mh.bsp, mh.ssp, mh.easgd])
def test_a_loop_of_steps_writes_a_line_for_each_step_with_its_loss(method):
    ranks = run(method(), stepped)
    steps = [line for lines in ranks for line in of_kind(lines, "step")]
    assert len(steps) == 2 * STEPS
    assert all(isinstance(line["loss"], float) and line["samples"] == 4 for line in steps)
    assert [len(of_kind(lines, "memory")) for lines in ranks] == [1, 1]


def test_the_header_comes_first_and_from_the_lead_only():
    lead, other = run(mh.ssp(staleness=2), stepped)
    assert (lead[0]["kind"], lead[0]["method"]) == ("header", "ssp:staleness=2")
    assert {name: lead[0][name] for name in ("workers", "servers", "steps", "batch_size", "bounded")} == {
        "workers": 2,
        "servers": 0,
        "steps": STEPS,
        "batch_size": 4,
        "bounded": True,
    }
    assert not of_kind(other, "header")


def test_the_lead_knows_the_weights_and_each_rank_its_bytes():
    ends = [lines[-1] for lines in run(mh.ssp(), stepped, servers=1)]
    assert [line["kind"] for line in ends] == ["rank_end"] * 3
    assert ["weights_sha256" in line for line in ends] == [True, False, False]
    assert all(line["bytes_sent"] > 0 for line in ends)


def test_the_same_run_has_the_same_lines_as_that_of_a_task():
    """Except the moments: a user's loop broadcasts the lead's model at its beginning."""
    trained = mh.train(task(samples=42), mh.bsp(lr=0.1), on=mh.Cluster(workers=2), steps=STEPS, batch_size=4)
    own = [line for lines in run(mh.bsp(lr=0.1), stepped) for line in of_kind(lines, "step")]
    names = set(of_kind(trained.records, "step")[0])
    assert all(set(line) == names for line in own)
    assert len(own) == len(of_kind(trained.records, "step"))


@pytest.mark.parametrize("method", [mh.bsp, mh.ssp, mh.diloco])
def test_a_prepared_loop_has_an_unknown_loss_unless_it_records_one(method):
    for lines in run(method(), prepared(), own=True):
        assert losses(lines) == [None] * len(losses(lines)) and losses(lines)


@pytest.mark.parametrize("where", ["between", "after"])
@pytest.mark.parametrize("method", [mh.bsp, mh.ssp, mh.diloco, mh.easgd])
def test_a_loss_that_is_recorded_belongs_to_its_step(method, where):
    given = {0: [], 1: []}

    def note(hands, loss, step):
        given[hands.rank].append(loss.item())
        hands.record(loss=loss)

    ranks = run(method(), prepared(**{where: note}), own=True)
    assert [losses(lines) for lines in ranks] == [given[0], given[1]]
    assert len(given[0]) > 3


def test_samples_are_those_of_the_passes_of_a_step():
    """42 samples are 11 mini-batches of 4, of which the last has 2."""
    lead, other = (
        [line["samples"] for line in of_kind(lines, "step")] for lines in run(mh.ssp(), prepared(), own=True)
    )
    assert (lead, other) == ([4, 4, 4, 4, 4, 2], [4, 4, 4, 4, 4])


def test_accumulated_passes_are_one_step_with_all_samples():
    def loop(hands, net):
        net, optimizer = hands.prepare(net, SGD(net.parameters(), 0.05))
        x, y = DATA.tensors
        for _ in range(3):
            with hands.accumulate():
                mse_loss(net(x[:4]), y[:4]).backward()
            mse_loss(net(x[4:9]), y[4:9]).backward()
            optimizer.step()
            optimizer.zero_grad()

    lines = run(mh.bsp(), loop, own=True)[0]
    assert [line["samples"] for line in of_kind(lines, "step")] == [9, 9, 9]
    assert lines[0]["batch_size"] == 9 and lines[0]["steps"] is None


def test_looking_at_the_answer_is_a_pause_of_every_worker():
    def look(hands, loss, step):
        if step == 2:
            hands.evaluate(lambda net: None)

    for rank, lines in enumerate(run(mh.bsp(), prepared(look), own=True)):
        (pause,) = of_kind(lines, "pause")
        assert pause["paused"] == rank and pause["to"] > pause["from"]


# -- numbers -----------------------------------------------------------------------------------------


def test_an_accuracy_is_an_evaluation_on_the_lead():
    def evaluated(hands, loss, step):
        hands.record(accuracy=0.1 * step)

    lead, other = run(mh.bsp(), prepared(evaluated), own=True)
    found = [(line["evaluated"], line["accuracy"]) for line in of_kind(lead, "evaluation")]
    assert found == [(step + 1, 0.1 * step) for step in range(6)]
    assert not of_kind(other, "evaluation")
    assert of_kind(other, "numbers")[3]["values"] == {"accuracy": pytest.approx(0.3)}


def test_other_numbers_have_lines_of_their_own():
    def note(hands, loss, step):
        if step == 1:
            hands.record(gradient_norm=torch.tensor([0.5]), rate=np.float32(0.25), epoch=3, unknown=None)

    for rank, lines in enumerate(run(mh.ssp(), prepared(note), own=True)):
        (line,) = of_kind(lines, "numbers")
        assert (line["step"], line["rank"]) == (2, rank)
        assert line["values"] == {"gradient_norm": 0.5, "rate": 0.25, "epoch": 3, "unknown": None}
        json.loads(encoded(line))


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (float("nan"), "x is nan, but must be finite"),
        (float("inf"), "x is inf, but must be finite"),
        ("0.5", "x is a str, but must be a number"),
        (True, "x is a bool, but must be a number"),
        (torch.ones(2), "x is a Tensor, but must be a number"),
    ],
    ids=["nan", "inf", "text", "bool", "two numbers"],
)
def test_what_is_no_number_is_refused(value, says):
    with pytest.raises(Refused, match=says):
        run(mh.bsp(), prepared(lambda hands, *_: hands.record(x=value)), own=True)


def test_a_number_before_training_and_a_loss_before_the_first_step_are_refused():
    with pytest.raises(Refused, match="before training began: call it after prepare, share or the first step"):
        run(mh.bsp(), lambda hands, net: hands.record(x=1))
    with pytest.raises(Refused, match="loss was recorded outside all steps"):
        run(mh.bsp(), lambda hands, net: (hands.share(DATA, 4, steps=1), hands.record(loss=1)))


def test_without_a_record_numbers_are_checked_and_dropped():
    def program(transport):
        with Hands(transport, model(), strategy=mh.bsp(), loss=mse_loss) as hands:
            for x, y in hands.share(DATA, 4, steps=2):
                hands.step(x, y)
                hands.record(loss=1.0, accuracy=0.5, mine=3)
        return hands.record(accuracy=0.5)

    assert simulate(mh.Cluster(workers=2), program).results == [None, None]


# -- the other end -----------------------------------------------------------------------------------

FACTS = {"task": "script.py", "world": "real", "link": "shm", "cluster": None}


def written(tmp_path, ranks, code=0, error=None, lost=(), session=0):
    """The record that the launching process makes of these lines; those of other ranks come before the lead's."""
    record = ScriptRecord(tmp_path, lambda folder: JoinRecord(folder, FACTS))
    for line in [line for lines in reversed(ranks) for line in lines]:
        kind = line["kind"] if line["kind"] in ("header", "rank_end", "result") else "lines"
        record.lines((session, kind, encoded(line)))
    record.ended(code, error, lost)
    return record


def read(path):
    return [json.loads(line) for line in (path / "record.jsonl").read_text().splitlines()]


def noted(hands, loss, step):
    hands.record(loss=loss, accuracy=0.1 * step)


def test_a_report_reads_the_record_as_one_of_a_task(tmp_path):
    ranks = run(mh.ssp(), prepared(noted), own=True)
    written(tmp_path, ranks)
    lines = read(tmp_path)
    assert (lines[0]["kind"], lines[0]["format"], lines[0]["task"]) == ("header", FORMAT, "script.py")
    assert lines[-1]["kind"] == "end" and lines[-1]["samples"] == 42
    assert lines[-1]["bytes_sent"] == sum(rank[-1]["bytes_sent"] for rank in ranks)
    found = totals(of_lines(lines), Target("accuracy", 0.3))
    assert found["failure"] is None and found["method"] == "ssp"
    assert found["accuracy"] == pytest.approx(0.5) and found["loss"] > 0
    assert 0 < found["seconds_to_target"] <= found["seconds"]


def test_an_accuracy_after_the_end_is_the_result(tmp_path):
    result = {"kind": "result", "test_accuracy": 0.75}
    lead, other = run(mh.bsp(), stepped)
    written(tmp_path, [[*lead, result], other])
    assert read(tmp_path)[-1]["test_accuracy"] == 0.75


def test_a_run_that_failed_says_why(tmp_path):
    lead, other = run(mh.bsp(), stepped)
    record = written(tmp_path, [lead[:-1], other[:-1]], code=1, error=mh.PeerLost(1, "it was killed"))
    end = read(tmp_path)[-1]
    assert end["error"] == "rank 1 is lost: it was killed" and end["lost"] == [[1, "it was killed"]]
    assert isinstance(record.error, mh.PeerLost)


def test_a_script_that_fails_after_training_has_failed(tmp_path):
    written(tmp_path, run(mh.bsp(), stepped), code=7)
    assert read(tmp_path)[-1]["error"] == "the script ended with exit code 7"


def test_a_script_that_does_not_train_leaves_no_record(tmp_path):
    record = written(tmp_path, [])
    assert isinstance(record.error, ScriptFailed) and not list(tmp_path.iterdir())


def test_every_join_has_a_record_of_its_own(tmp_path):
    from manyhands.report.reading import records

    ranks = run(mh.bsp(), stepped)
    record = ScriptRecord(tmp_path, lambda folder: JoinRecord(folder, FACTS))
    for session in (0, 1):
        for line in [line for lines in ranks for line in lines]:
            kind = line["kind"] if line["kind"] in ("header", "rank_end") else "lines"
            record.lines((session, kind, encoded(line)))
    record.ended(7, None, ())
    assert records(tmp_path) == [tmp_path / "record.jsonl", tmp_path / "join-2" / "record.jsonl"]
    first, second = (read(path.parent)[-1] for path in records(tmp_path))
    assert "error" not in first and second["error"] == "the script ended with exit code 7"


def test_a_comparison_says_what_a_script_leaves_out(tmp_path):
    written(tmp_path, run(mh.bsp(), prepared(), own=True))
    found = of_lines(read(tmp_path))
    assert notes_on(found, 0, tmp_path) == [
        "the script records neither loss nor accuracy: hands.record(loss=..., accuracy=...)"
    ]
    (tmp_path / "join-2").mkdir()
    (tmp_path / "join-2" / "record.jsonl").touch()
    (same, several, _) = notes_on(found, 1, tmp_path)
    assert same.startswith("the script sets its seed itself") and several.startswith("the script joins several times")


def test_adapters_get_the_numbers_of_a_script():
    lines = run(mh.ssp(), prepared(lambda hands, loss, step: hands.record(loss=loss, accuracy=0.5, epoch=3)), own=True)
    scalars = Scalars()
    found = [pair for line in lines[0] if line["kind"] not in ("rank_end",) for pair in scalars(line)]
    assert {name for name, _ in found} == {"loss", "bytes", "lag", "wait", "compute/rank0", "accuracy", "epoch"}
    assert ("accuracy", 0.5) in found and ("epoch", 3.0) in found


def test_a_comparison_runs_the_script_with_every_method_and_seed(tmp_path, monkeypatch):
    given = []

    def recorded(script, arguments, out, *, settings, **how):
        given.append((str(out.relative_to(tmp_path)), settings.method, settings.seed, how["workers"], how["prints"]))
        out.mkdir(parents=True)
        written(out, run(mh.bsp(), prepared(noted), own=True))
        return 0, None

    monkeypatch.setattr(compare_scripts, "run_recorded", recorded)
    found = compare_scripts.compare_scripts(Path("script.py"), ["-x"], ["bsp", "ssp:lr=0.1"], out=tmp_path, seeds=2)
    assert given == [
        ("bsp/seed-0", "bsp", 0, 2, False),
        ("bsp/seed-1", "bsp", 1, 2, False),
        ("ssp-lr=0.1/seed-0", "ssp:lr=0.1", 0, 2, False),
        ("ssp-lr=0.1/seed-1", "ssp:lr=0.1", 1, 2, False),
    ]
    assert len(found.runs) == 4 and found.report == tmp_path / "report.html" and found.report.is_file()
    assert len(found.notes) == 1 and found.notes[0].startswith("the script sets its seed itself")


def test_a_record_of_an_earlier_run_does_not_survive_one_that_fails_to_begin(tmp_path, monkeypatch):
    written(tmp_path / "out", run(mh.bsp(), stepped))

    def fails(*_, observer, **__):
        observer.ended(2, Refused("no such method"), ())
        return 2

    monkeypatch.setattr(script_record, "run_script", fails)
    code, error = script_record.run_recorded(Path("script.py"), [], tmp_path / "out", workers=2)
    assert (code, str(error)) == (2, "no such method")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "out").touch()
    with pytest.raises(Refused, match="out, but must be a folder that can be written: File exists"):
        script_record.run_recorded(Path("script.py"), [], tmp_path / "out", workers=2)


def test_an_interrupted_script_says_so_in_its_record(tmp_path, monkeypatch):
    def interrupted(*_, observer, **__):
        for line in run(mh.bsp(), stepped)[0][:-1]:
            observer.lines((0, "header" if line["kind"] == "header" else "lines", encoded(line)))
        raise KeyboardInterrupt

    monkeypatch.setattr(script_record, "run_script", interrupted)
    with pytest.raises(KeyboardInterrupt):
        script_record.run_recorded(Path("script.py"), [], tmp_path, workers=2)
    end = read(tmp_path)[-1]
    assert (end["error"], end["error_kind"]) == ("interrupted", "KeyboardInterrupt")
