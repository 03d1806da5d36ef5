"""Traces: valid for those who read them, and of all ranks."""

import json
from itertools import pairwise

import pytest

from manyhands.report.groups import sections
from manyhands.report.trace import trace, write_trace
from synthetic_runs import failed, made

ROUNDING = 0.0021
"""Microseconds: both ends of a span are rounded to a thousandth."""


@pytest.fixture
def events():
    cluster = {"faults": [{"rank": 2, "at": 0.5, "why": "it died"}]}
    (section,) = sections([made(), made(seed=1), failed(method="bsp", cluster=cluster)])
    return list(trace(section.members))


def test_every_event_says_what_when_and_where(events):
    for event in events:
        assert event["name"]
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert event["ph"] in "XMi"
        if event["ph"] != "M":
            assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0


def test_spans_of_a_rank_follow_each_other(events):
    ranks = {}
    for event in events:
        if event["ph"] == "X":
            ranks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    assert len(ranks) == 12
    for spans in ranks.values():
        spans.sort()
        for (_, stop), (start, _) in pairwise(spans):
            assert start >= stop - ROUNDING


def test_processes_and_threads_have_names(events):
    names = {(e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M"}
    assert names["process_name", 0, 0] == "ssp:staleness=3, seed 0, host 0"
    for event in events:
        assert ("process_name", event["pid"], 0) in names
        assert ("thread_name", event["pid"], event["tid"]) in names or event["ph"] == "M"


def test_faults_are_moments(events):
    (lost,) = [event for event in events if event["ph"] == "i"]
    assert lost["name"] == "rank 2 is lost: it died"
    assert (lost["ts"], lost["tid"]) == (500_000, 2)


def test_a_trace_is_json(tmp_path):
    (section,) = sections([made()])
    write_trace(section.members, tmp_path / "trace.json")
    found = json.loads((tmp_path / "trace.json").read_text())
    assert found == {"displayTimeUnit": "ms", "traceEvents": list(trace(section.members))}
