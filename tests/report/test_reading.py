"""Records that are whole, cut short, damaged, resumed, or no records at all."""

import json

import pytest

import manyhands as mh
from manyhands.core.errors import Refused
from manyhands.report.measures import Measures
from manyhands.report.reading import of_lines, read
from report.written import end, header, step
from synthetic_runs import lines

WHOLE = [header(), step(0, 1, 0.0, 1.0, bytes=10), step(0, 2, 1.0, 2.0, bytes=20), end(0.5)]


def written(tmp_path, lines, tail=""):
    path = tmp_path / "record.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)
    return path


def test_a_record_is_found_by_its_name_or_by_its_folder(tmp_path):
    path = written(tmp_path, WHOLE)
    for where in (path, tmp_path):
        run = read(where)
        assert (run.method, run.task, len(run.steps), run.failure, run.warnings) == ("bsp", "digits", 2, None, [])
        assert run.path == path


def test_of_a_record_cut_short_every_complete_line_is_kept_with_a_warning(tmp_path):
    whole = json.dumps(WHOLE[2])
    run = read(written(tmp_path, WHOLE[:2], tail=whole[: len(whole) // 2]))
    assert len(run.steps) == 1 and run.failure == "its record ends in the middle"
    assert run.warnings == [
        "line 3 is damaged or cut short, and left out",
        "the record has no last line: the run was cut short, and this report shows what was recorded",
    ]


def test_a_record_of_format_1_has_no_kinds_and_is_read_all_the_same():
    now = [*lines(), *failed_end()]
    before = [{name: value for name, value in line.items() if name not in ("kind", "error_kind")} for line in now]
    before[0]["format"] = 1
    before[-1]["kind"] = "PeerLost"  # the class of an error was called so
    old, new = of_lines(before), of_lines(now)
    assert (old.steps, old.evaluations, old.pauses, old.memory) == (new.steps, new.evaluations, new.pauses, new.memory)
    assert old.end == new.end and old.failure == "rank 2 is lost"
    assert len(old.steps) == 40 and len(old.pauses) == 4 and len(old.memory) == 4 and len(old.evaluations) == 1


def failed_end():
    return [{"kind": "end", "end": True, "error": "rank 2 is lost", "error_kind": "PeerLost", "lost": [[2, "it died"]]}]


def test_a_damaged_line_in_the_middle_is_left_out(tmp_path):
    path = written(tmp_path, WHOLE)
    rows = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(rows[0] + b'{"step": 1, \xff\xfe}\n' + b"".join(rows[2:]))
    run = read(path)
    assert len(run.steps) == 1 and run.failure is None
    assert run.warnings == ["line 2 is damaged or cut short, and left out"]


def test_what_is_no_record_is_refused(tmp_path):
    with pytest.raises(Refused, match="cannot read the record"):
        read(tmp_path)
    with pytest.raises(Refused, match="is empty"):
        read(written(tmp_path, []))
    with pytest.raises(Refused, match="it is no record"):
        read(written(tmp_path, [{"hello": 1}]))
    with pytest.raises(Refused, match="has format 7, but must have 1 or 2"):
        read(written(tmp_path, [header(format=7)]))


def test_a_resumed_run_is_one_run():
    run = of_lines([*WHOLE, header(start=2), step(0, 3, 0.0, 1.5, bytes=5), end(0.75)])
    assert [line["time"] for line in run.steps] == [1.0, 2.0, 3.5]
    assert [line["bytes"] for line in run.steps] == [10, 20, 25]
    assert run.end["test_accuracy"] == 0.75


def test_a_resumed_run_reads_as_long_as_an_uninterrupted_one(tmp_path):
    cluster = mh.Cluster(workers=2)
    for steps, resume in ((10, None), (20, tmp_path)):
        mh.train("digits", mh.bsp(), cluster=cluster, steps=steps, out=tmp_path, checkpoint_every=10, resume=resume)
    run = read(tmp_path)
    whole = of_lines(mh.train("digits", mh.bsp(), cluster=cluster, steps=20).records)
    assert sorted(line["step"] for line in run.steps) == sorted(line["step"] for line in whole.steps)
    assert Measures(run).samples == Measures(whole).samples
    assert Measures(run).seconds == pytest.approx(Measures(whole).seconds, abs=1e-4), "some wake a latency later"
    assert Measures(run).bytes == pytest.approx(Measures(whole).bytes)


def test_a_run_that_failed_says_why_in_its_last_line(tmp_path):
    with pytest.raises(mh.Diverged):
        mh.train("digits", mh.bsp(lr=1e6), cluster=mh.Cluster(workers=2), steps=50, out=tmp_path / "diverged")
    assert "training diverged" in read(tmp_path / "diverged").failure
    dies = mh.Cluster(workers=3, faults=[mh.Die(1, 0.002)])
    with pytest.raises(mh.PeerLost):
        mh.train("digits", mh.bsp(), cluster=dies, steps=50, out=tmp_path / "lost")
    lost = read(tmp_path / "lost")
    assert lost.lost == [(1, "it died")] and len(lost.steps) > 3
