"""A disk that is full: one sentence with the path, nothing half written, and a run that says truly how it ended."""

import errno
import os
from pathlib import Path

import pytest

import manyhands as mh
from manyhands.core.record import SHAPES
from manyhands.report.reading import read
from manyhands.runtime import checkpoint
from manyhands.runtime.checkpoint import load_checkpoint

from .small import steps_of, task

FULL = "cannot be written: No space left on device"


@pytest.fixture
def fits(monkeypatch):
    """Whether each of the next files fits on the disk; one that does not is written in part."""
    answers, write = [], checkpoint._write

    def attempt(path, data):
        if answers and not answers.pop(0):
            path.write_bytes(data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write(path, data)

    monkeypatch.setattr(checkpoint, "_write", attempt)
    return answers


def said(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "manyhands"]


def run(out, **settings):
    return mh.train(task(), mh.bsp(lr=0.01), steps=6, out=out, checkpoint_every=2, **settings)


CHECKPOINT = 4
"""Files that a checkpoint has."""
YES, NO = True, False


def test_a_checkpoint_in_the_middle_that_does_not_fit_is_a_warning_and_the_next_one_is_tried(fits, tmp_path, caplog):
    whole = run(tmp_path / "whole")
    fits += [*[YES] * CHECKPOINT, YES, NO]
    result = run(tmp_path / "out")
    folder = tmp_path / "out" / "checkpoints"
    assert said(caplog) == [
        f"{folder / 'step-00000004'} {FULL}; the run continues, and saves again at the next checkpoint"
    ]
    assert sorted(os.listdir(folder)) == ["step-00000002", "step-00000006"], "nothing is left of the one that failed"
    assert load_checkpoint(folder).facts["step"] == 6
    assert result.weights_sha256 == whole.weights_sha256 and len(steps_of(result)) == len(steps_of(whole))


def test_it_is_in_the_record(fits, tmp_path):
    fits += [NO]
    (line,) = [line for line in run(tmp_path).records if line["kind"] == "unsaved"]
    assert line.keys() == SHAPES["unsaved"].__required_keys__
    assert (line["unsaved"], line["why"]) == (2, f"{tmp_path / 'checkpoints' / 'step-00000002'} {FULL}")
    assert read(tmp_path).end["kind"] == "end", "reports read such a record"


def test_a_last_checkpoint_that_does_not_fit_ends_the_run_with_an_error(fits, tmp_path):
    fits += [*[YES] * 2 * CHECKPOINT, NO]
    folder = tmp_path / "checkpoints"
    with pytest.raises(mh.ManyhandsError) as raised:
        run(tmp_path)
    assert str(raised.value) == f"the run is complete, but could not be saved: {folder / 'step-00000006'} {FULL}"
    assert sorted(os.listdir(folder)) == ["step-00000002", "step-00000004"]
    record = read(tmp_path)
    assert record.end["error"] == str(raised.value)
    assert {line["step"] for line in record.steps} == set(range(1, 7)), "training was complete"
    assert run(tmp_path, resume=tmp_path).samples == 2 * 4 * 4


def test_a_record_that_does_not_fit_is_one_warning_and_the_run_continues(tmp_path, caplog):
    """/dev/full is always full."""
    (tmp_path / "record.jsonl").symlink_to("/dev/full")
    result = mh.train(task(), mh.bsp(lr=0.01), steps=6, out=tmp_path)
    path = tmp_path / "record.jsonl"
    assert said(caplog) == [f"{path} {FULL}; the run continues, but its record is incomplete"]
    assert result.record_error == f"{path} {FULL}" and result.record == path
    assert {line["step"] for line in steps_of(result)} == set(range(1, 7)), "the records in memory are complete"
    assert [line["kind"] for line in (result.records[0], result.records[-1])] == ["header", "end"]


def test_a_record_that_was_written_has_no_error(tmp_path):
    assert mh.train(task(), mh.bsp(lr=0.01), steps=2, out=tmp_path).record_error == ""


def test_a_folder_without_room_for_a_record_is_refused_before_the_run(tmp_path):
    (tmp_path / "record.jsonl").mkdir()
    with pytest.raises(mh.Refused, match=r"record\.jsonl cannot be written: Is a directory, but a record must be:"):
        mh.train(task(), mh.bsp(lr=0.01), steps=2, out=tmp_path)


def test_the_command_line_ends_with_an_error_if_the_record_is_incomplete(tmp_path, capsys):
    from manyhands.cli import main

    Path(tmp_path / "record.jsonl").symlink_to("/dev/full")
    code = main(["train", "bsp", "--virtual", "--workers", "2", "--steps", "4", "--out", str(tmp_path)])
    out, err = capsys.readouterr()
    assert code == 1 and "bsp on digits" in out, "the result is printed all the same"
    assert err.splitlines()[-1] == f"manyhands: the record is incomplete: {tmp_path / 'record.jsonl'} {FULL}"
    assert "Traceback" not in err
