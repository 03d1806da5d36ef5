"""The record itself: what is in memory, in the file and passed to listeners is the same."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from manyhands.core.record import decoded, encoded
from manyhands.report.record import NAME, Record

ODD = {
    "infinite": float("inf"),
    "undefined": float("nan"),
    "many": 2**80,
    "numpy": np.float64(0.25),
    "vector": np.arange(3),
    "tensor": torch.tensor([1.5, 2.5]),
    "path": Path("a/b"),
    "pair": (1, "zwei"),
    "rows": {3: {"inner": float("-inf")}},
    "text": "one\r\ntwo\u2028three \ud800",
}
PLAIN = {
    "infinite": None,
    "undefined": None,
    "many": 2**80,
    "numpy": 0.25,
    "vector": [0, 1, 2],
    "tensor": [1.5, 2.5],
    "path": "a/b",
    "pair": [1, "zwei"],
    "rows": {"3": {"inner": None}},
    "text": ODD["text"],
}


@pytest.mark.parametrize("name", ODD)
def test_a_line_carries_what_json_can_and_texts_of_the_rest(name):
    line = encoded({name: ODD[name], "step": 1})
    assert line.count(b"\n") == 1 and line.endswith(b"\n")
    assert json.loads(line) == {name: PLAIN[name], "step": 1}
    assert list(decoded(line)) == [{name: PLAIN[name], "step": 1}]


@pytest.mark.parametrize("name", ODD)
def test_what_is_not_finite_is_null_whatever_stands_beside_it(name):
    assert json.loads(encoded({"loss": float("nan"), name: ODD[name]}))["loss"] is None


def test_floats_come_back_to_the_last_bit():
    values = [0.1, 1 / 3, 5e-324, 1.7976931348623157e308, -0.0, 1e22]
    (line,) = decoded(encoded({"values": values}))
    assert [one.hex() for one in line["values"]] == [one.hex() for one in values]


def test_memory_the_file_and_listeners_have_the_same_lines(tmp_path):
    class Collected(list):
        write, close = list.append, list.clear

    collected, before = Collected(), []
    with Record(tmp_path, also=[collected]) as record:
        record.write({"participants": [], "lr": float("inf")})
        early = record.lines
        record.add(encoded({"step": 1}) + encoded({"step": 2}))
        record.write({"end": True})
        before = list(collected)
    found = [json.loads(row) for row in (tmp_path / NAME).read_text().splitlines()]
    assert found == record.lines == before
    assert found == [{"participants": [], "lr": None}, {"step": 1}, {"step": 2}, {"end": True}]
    assert early is record.lines and collected == []


def test_a_resumed_run_appends_to_its_file(tmp_path):
    for number in range(2):
        with Record(tmp_path, goes_on=number > 0) as record:
            record.write({"part": number})
    assert record.lines == [{"part": 1}]
    assert list(decoded((tmp_path / NAME).read_bytes())) == [{"part": 0}, {"part": 1}]


@pytest.mark.parametrize("before", [b"", b'{"part": 0}\n', b'{"part": 0}\n{"ste'])
def test_a_line_that_was_cut_short_does_not_swallow_the_next(before, tmp_path):
    (tmp_path / NAME).write_bytes(before)
    with Record(tmp_path, goes_on=True) as record:
        record.write({"part": 1})
    kept = before if before.endswith(b"\n") or not before else before + b"\n"
    assert (tmp_path / NAME).read_bytes() == kept + encoded({"part": 1})
