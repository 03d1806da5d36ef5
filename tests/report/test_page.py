"""Reports on disk: complete, small, escaped, and of whatever is left of a record."""

import csv
import json
import re
import sys
import time
from html.parser import HTMLParser

import pytest

import manyhands as mh
from manyhands.core.errors import Refused
from manyhands.report.html import _library
from manyhands.report.measures import Target, parse_target
from manyhands.report.page import write_report
from manyhands.report.pictures import NoPictures
from manyhands.report.reading import of_lines, read, records
from synthetic_runs import failed, lines, made

CHARTS = ("curves", "memory", "pareto", "spent", "staleness", "stragglers", "timeline")


class Page(HTMLParser):
    """The visible text and the ids."""

    def __init__(self, text):
        super().__init__()
        self.ids, self.text, self._silent = [], "", False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self._silent = tag in ("script", "style")
        self.ids += [value for name, value in attributes if name == "id"]

    def handle_endtag(self, tag):
        self._silent = False

    def handle_data(self, data):
        self.text += "" if self._silent else data


def own(page):
    """The page without the chart library."""
    return page.read_text(encoding="utf-8").replace(_library(), "")


def test_a_report_is_complete(tmp_path):
    page = write_report(
        [made(), made(method="bsp")], tmp_path / "out", target=Target("accuracy", 0.9), notes=["a note"]
    )
    assert page == tmp_path / "out" / "report.html"
    names = sorted(path.name for path in (tmp_path / "out" / "data").iterdir())
    assert names == [f"digits-virtual-{chart}.csv" for chart in CHARTS]
    assert json.loads((tmp_path / "out" / "trace.json").read_text())["traceEvents"]
    shown = Page(own(page))
    for words in (
        "ssp, bsp on digits",
        "How to repeat it",
        "manyhands train ssp --seed 0",
        "a note",
        "time to accuracy 0.9",
        "samples to it",
    ):
        assert words in shown.text
    assert len(set(shown.ids)) == len(shown.ids)
    for link in re.findall(r'href="((?:data/|trace)[^"]+)"', own(page)):
        assert (tmp_path / "out" / link).is_file()


def test_the_schedules_of_pipelines_are_drawn(tmp_path):
    def run(strategy, name):
        return of_lines(
            mh.train("digits", strategy, cluster=mh.Cluster(workers=2), steps=2, out=tmp_path / name).records
        )

    page = write_report([run(mh.gpipe(micro_batches=2), "gpipe"), run(mh.pipedream(), "pipedream"), made()], tmp_path)
    shown = Page(own(page)).text
    assert "s0 F0 F1 .  .  B0 B1\ns1 .  F0 F1 B0 B1 ." in shown
    assert "s0 F0 F1 .  B0 F2 B1 .  B2\ns1 .  F0 B0 F1 B1 F2 B2 ." in shown
    assert "Schedules" not in Page(own(write_report([made()], tmp_path))).text
    wide = run(mh.one_f_one_b(micro_batches=32), "wide").header["schedule"]
    assert max(map(len, wide.splitlines())) <= 120 and "B31" in wide
    assert "schedule" not in run(mh.bsp(), "bsp").header and "schedule" not in made().header


def test_csv_files_hold_the_curves(tmp_path):
    write_report([made()], tmp_path)
    with (tmp_path / "data" / "digits-virtual-curves.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["method", "seed", "measure", "virtual seconds", "samples", "bytes", "value"]
    assert sum(row["measure"] == "loss" for row in rows) == 40


def test_nothing_in_a_record_becomes_markup(tmp_path):
    evil = '</script><img src=x onerror="alert(1)">&'
    page = write_report([made(method=evil, task=evil)], tmp_path, title=evil, notes=[evil])
    assert "<img" not in own(page)
    assert evil in Page(own(page)).text


def test_failed_runs_and_damage_are_shown(tmp_path):
    (tmp_path / "cut.jsonl").write_text("\n".join(json.dumps(line) for line in lines(method="gossip"))[:-400])
    cut = read(tmp_path / "cut.jsonl")
    text = Page(own(write_report([made(), failed(method="bsp"), cut], tmp_path / "out"))).text
    assert "failed: rank 2 is lost: it died" in text
    assert "failed: its record ends in the middle" in text
    assert "gossip, seed 0: the record has no last line" in text
    assert "3 runs of 3 methods, 2 of them without a result" in text


def test_a_run_without_a_step_is_shown(tmp_path):
    empty = of_lines(
        [lines()[0], {"kind": "end", "end": True, "error": "it was too early", "error_kind": "Refused", "lost": []}]
    )
    assert "it was too early" in Page(own(write_report([empty], tmp_path))).text


def test_other_tasks_have_other_sections(tmp_path):
    page = write_report([made(), made(task="text"), made(world="real")], tmp_path)
    headings = re.findall(r"<h2[^>]*>([^<]+)<", own(page))
    expected = ["digits, in virtual time", "text, in virtual time", "digits, among real processes", "How to repeat it"]
    assert headings == expected


def test_no_runs_are_refused(tmp_path):
    with pytest.raises(Refused, match="the number of runs is 0, but must be >= 1"):
        write_report([], tmp_path)


def test_twenty_runs_take_less_than_a_megabyte(tmp_path):
    methods = [f"method:knob={n}" for n in range(5)]
    runs = [made(2000, method=method, seed=seed) for method in methods for seed in range(4)]
    began = time.perf_counter()
    page = write_report(runs, tmp_path, target=Target("accuracy", 0.9))
    print(f"{time.perf_counter() - began:.2f} s, {len(own(page).encode()) / 1e6:.3f} MB beside the chart library")
    assert len(own(page).encode()) < 1_000_000


def test_targets_are_read():
    assert parse_target("accuracy=0.95") == Target("accuracy", 0.95)
    assert parse_target(" loss = 1e-3 ") == Target("loss", 1e-3)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("speed=3", "there is no measure for a target 'speed': known are accuracy, loss"),
        ("acuracy=1", "did you mean accuracy?"),
        ("accuracy", "target is 'accuracy', but must be accuracy=VALUE"),
        ("accuracy=95", "accuracy of the target is 95, but must be > 0 and <= 1"),
        ("accuracy=high", "accuracy of the target is 'high', but must be a number"),
        ("loss=0", "loss of the target is 0, but must be > 0 and finite"),
        ("loss=nan", "loss of the target is nan, but must be > 0 and finite"),
    ],
)
def test_targets_that_make_no_sense_are_refused(text, said):
    with pytest.raises(Refused, match=re.escape(said)):
        parse_target(text)


def test_records_are_found_in_folders(tmp_path):
    for name in ("a", "b/c"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "record.jsonl").write_text("")
    assert records(tmp_path) == [tmp_path / "a" / "record.jsonl", tmp_path / "b" / "c" / "record.jsonl"]
    assert records(tmp_path / "a") == records(tmp_path / "a" / "record.jsonl")
    (tmp_path / "empty").mkdir()
    with pytest.raises(Refused, match="has no record"):
        records(tmp_path / "empty")


def test_pictures_say_what_they_need(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "kaleido", None)
    with pytest.raises(NoPictures, match=re.escape("pip install 'manyhands[png]'")):
        write_report([made()], tmp_path, png=True)
    assert (tmp_path / "report.html").is_file()


def test_pictures_say_that_a_browser_is_missing(monkeypatch, tmp_path):
    pytest.importorskip("kaleido")
    monkeypatch.setenv("BROWSER_PATH", "/nowhere/chromium")
    with pytest.raises(NoPictures, match="install Chromium"):
        write_report([made()], tmp_path, png=True)
