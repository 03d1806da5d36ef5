"""docs/records.md mentions every field that records have."""

import re
from pathlib import Path

import pytest

import manyhands as mh
from manyhands.core.record import SHAPES

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "records.md").read_text(encoding="utf-8")
SECTIONS = {part.partition("\n")[0]: part for part in TEXT.split("\n## ")[1:]}


def unmentioned(lines):
    """Fields that the section of their kind of line does not name."""
    missing = set()
    for line in lines:
        title = line["kind"].capitalize()
        named = set(re.findall(r"`(\w+)`", SECTIONS[title]))
        missing |= {f"{title}: {field}" for field in line if field not in named}
    return missing


def misshapen(lines):
    """Fields that the shape of their kind of line has and the line has not, or the reverse; steps may have more."""
    wrong = set()
    for line in lines:
        shape = SHAPES[line["kind"]]
        missing = shape.__required_keys__ - line.keys()
        unknown = line.keys() - shape.__annotations__.keys() if line["kind"] != "step" else set()
        wrong |= {f"{line['kind']}: {field}" for field in missing | unknown}
    return wrong


@pytest.mark.parametrize("method", [mh.bsp, mh.ssp, mh.ad_psgd, mh.gpipe, mh.hybrid, mh.sufficient_factors])
def test_every_field_of_virtual_runs_is_described(method):
    cluster = mh.Cluster(workers=2, stragglers=mh.Slow([0]))
    result = mh.train("digits", method(), cluster=cluster, steps=6, evaluate_every=3)
    assert unmentioned(result.records) == set()
    assert {line["kind"] for line in result.records} == set(SHAPES) - {"numbers", "unsaved"}
    assert misshapen(result.records) == set()


def test_every_field_of_real_runs_is_described():
    records = mh.train("digits", mh.ssp(), workers=2, steps=6, evaluate_every=3).records
    assert unmentioned(records) == misshapen(records) == set()


def test_what_stands_inside_the_header_is_described():
    header, *_ = mh.train("digits", mh.bsp(), steps=1).records
    named = set(re.findall(r"`(\w+)`", SECTIONS["Header"]))
    inside = [header["made"], header["made"]["versions"], header["made"]["machine"], header["participants"][0]]
    assert {field for one in inside for field in one} <= named


def test_a_failed_end_is_described(tmp_path):
    from manyhands.report.reading import read

    cluster = mh.Cluster(workers=2, faults=[mh.Die(rank=1, at=0.001)])
    with pytest.raises(mh.PeerLost):
        mh.train("digits", mh.bsp(), cluster=cluster, steps=50, out=tmp_path)
    end = read(tmp_path).end
    assert unmentioned([end]) == misshapen([end]) == set()
    assert (end["kind"], end["error_kind"]) == ("end", "PeerLost")


def test_every_field_of_a_script_s_record_is_described(tmp_path):
    from end_to_end.test_loop_records import noted, prepared, read, run, written

    def note(hands, loss, step):
        noted(hands, loss, step)
        hands.record(mine=step)
        if step == 1:
            hands.evaluate(lambda net: None)

    written(tmp_path, run(mh.ssp(), prepared(note), own=True))
    records = read(tmp_path)
    assert unmentioned(records) == misshapen(records) == set()
    assert {line["kind"] for line in records} == set(SHAPES) - {"unsaved"}
