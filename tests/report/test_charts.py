"""Charts hold what the measures of their runs say, rounded and thinned."""

import numpy as np
import pytest

from manyhands.report.chart import number, thin
from manyhands.report.charts.curves import curves
from manyhands.report.charts.memory import NAMES, memory
from manyhands.report.charts.pareto import front, pareto
from manyhands.report.charts.staleness import staleness
from manyhands.report.charts.stragglers import stragglers
from manyhands.report.charts.time_breakdown import MOST_RANKS, spent
from manyhands.report.charts.timeline import BARS, timeline
from manyhands.report.groups import sections
from manyhands.report.measures import Curve, Measures, Target
from manyhands.report.moments import incidents, seconds, segments
from manyhands.report.reading import of_lines
from manyhands.report.theme import ACTIVITIES
from synthetic_runs import failed, lines, made, step


def section_of(*runs, target=None):
    (section,) = sections(runs, target)
    return section


def test_numbers_have_six_digits():
    assert number(123456789.0) == 123457000
    assert number(0.123456789) == 0.123457
    assert isinstance(number(2.0), int)


def test_thin_curves_keep_their_ends():
    column = np.arange(1000.0)
    thinned = thin(Curve(column, column, column, column), 300)
    assert len(thinned.values) <= 300
    assert (thinned.values[0], thinned.values[-1]) == (0, 999)


def test_curves_are_those_of_the_measures():
    run = made()
    chart = curves(section_of(run))
    assert [view.label for view in chart.views] == ["virtual seconds", "samples", "bytes sent"]
    m = Measures(run)
    for name, view in zip(("seconds", "samples", "bytes"), chart.views, strict=True):
        for trace, curve in zip(view.figure["data"], (m.loss, m.accuracy), strict=True):
            assert trace["x"] == pytest.approx(getattr(curve, name), rel=1e-5)
            assert trace["y"] == pytest.approx(curve.values, rel=1e-5)
    assert view.figure["layout"]["xaxis"]["title"]["text"] == "bytes sent"


def test_memory_is_drawn_by_purpose():
    kept = {"weights": 4000, "gradient": 4100, "optimizer": 8000, "bytes": 16_200}
    flying = {"versions": 3, "version_bytes": 8000, "activations": 500}
    run, other = made(method="pipedream"), made(method="old")
    for rank in run.memory_lines:
        run.memory_lines[rank] = {"held": rank, **kept, **flying, "bytes": kept["bytes"] + 10 * rank}
    chart = memory(section_of(run, other))
    assert [view.label for view in chart.views][:2] == ["all methods", "pipedream, seed 0"]
    rows = {(shown, bar): sizes for shown, bar, *sizes in chart.table.rows()}
    assert rows["pipedream, seed 0", "rank 0"] == [4000, 4100, 8000, 8000, 500, 0], "other versions are gone at the end"
    rest = pytest.approx(max(other.memory.values()), rel=1e-5)
    assert rows["all methods", "old"] == [0, 0, 0, 0, 0, rest], "all of an older record"
    for trace, name in zip(chart.views[0].figure["data"], NAMES, strict=True):
        assert trace["name"] == name and trace["x"][0] == rows["all methods", "pipedream"][NAMES.index(name)]
    assert "pipedream 24.6 kB" in chart.summary


def test_one_seed_of_each_method_is_bold():
    runs = [made(seed=seed, method=method) for method in ("bsp", "ssp") for seed in range(3)]
    data = curves(section_of(*runs)).views[0].figure["data"]
    assert len(data) == 12
    assert [trace["name"] for trace in data if trace["showlegend"]] == ["bsp", "ssp"]
    assert {trace["line"]["color"] for trace in data if trace["name"] == "bsp"} == {data[0]["line"]["color"]}


def test_the_front_is_what_no_method_beats():
    points = [(1, 5), (2, 3), (3, 4), (4, 1), (2, 3)]
    assert front(points) == [True, True, False, True, True]


def test_pareto_shows_medians_to_the_target():
    target = Target("accuracy", 0.9)
    runs = [made(seed=seed, speed=speed) for seed, speed in ((0, 1.0), (1, 2.0), (2, 3.0))] + [failed(method="bsp")]
    section = section_of(*runs, target=target)
    chart = pareto(section)
    assert [view.label for view in chart.views] == ["bytes sent", "memory of a rank"]
    rows = [row for row in chart.table.rows() if row[2] == "bytes sent"]
    name, _, _, point, across, up = rows[0]
    reached = sorted(Measures(run).to_target(target)["seconds"] for run in runs[:3])
    assert (name, point) == ("ssp:staleness=3", "median of 3 runs, on the front")
    assert [row[3] for row in rows[1:]] == ["seed 0", "seed 1", "seed 2"]
    assert across == pytest.approx(reached[1], rel=1e-5)
    assert up > 0
    assert "bsp" in chart.views[0].note


def test_pareto_without_a_target_shows_the_answer():
    chart = pareto(section_of(made(), made(method="bsp")))
    assert [view.label for view in chart.views] == [
        "accuracy and time",
        "accuracy and bytes",
        "loss and time",
        "loss and bytes",
    ]


def test_staleness_counts_every_step():
    chart = staleness(section_of(made(seed=0), made(seed=1)))
    (trace,) = chart.views[0].figure["data"]
    assert sum(trace["y"]) == pytest.approx(1, abs=1e-4)
    assert trace["x"] == ["0", "1", "2", "3"]


def test_large_lags_are_put_together():
    changed = [line | {"lag": n} if line["kind"] == "step" else line for n, line in enumerate(lines(200))]
    ticks = staleness(section_of(of_lines(changed))).views[0].figure["data"][0]["x"]
    assert len(ticks) <= 41
    assert ticks[0] == "0 to 5"


def test_spent_is_that_of_the_measures():
    run = made()
    chart = spent(section_of(run))
    assert [view.label for view in chart.views] == ["all methods", "ssp:staleness=3, seed 0"]
    found = {trace["name"]: trace["x"] for trace in chart.views[1].figure["data"]}
    for rank, row in Measures(run).spent().items():
        for name in ACTIVITIES:
            assert found[name][rank] == pytest.approx(row[name], rel=1e-4)


def test_of_many_ranks_the_slowest_are_drawn():
    chart = spent(section_of(made(80, workers=40)))
    view = chart.views[1]
    assert len(view.figure["data"][0]["y"]) == MOST_RANKS
    assert view.figure["data"][0]["y"][0] == "rank 0"
    assert "Of 40 ranks" in view.note
    assert sum(row[0] == view.label for row in chart.table.rows()) == 40


def test_stragglers_are_those_of_the_measures():
    (trace,) = stragglers(section_of(made())).views[0].figure["data"]
    assert trace["y"] == pytest.approx(list(Measures(made()).stragglers().values()), rel=1e-4)
    assert trace["y"][0] > 1.5


def test_parts_of_a_step_fill_it():
    parts = list(segments(step(0, 1, 2.0, seconds=1.0)))
    assert [part.activity for part in parts] == ["wait", "compute", "encode", "send", "wait", "other"]
    assert [part.seconds for part in parts] == pytest.approx([0.1, 0.5, 0.1, 0.1, 0.1, 0.1])
    assert parts[0].start == 2.0
    assert parts[-1].start + parts[-1].seconds == pytest.approx(3.0)


def test_parts_of_a_step_never_leave_it():
    odd = step(0, 1, 0.0, seconds=1.0) | {"compute_began": 0.9, "compute": 0.5, "wait": 0.0, "send": 0.3}
    parts = list(segments(odd))
    assert [part.activity for part in parts] == ["send", "encode", "other", "compute"]
    assert parts[-1].start + parts[-1].seconds == pytest.approx(1.0)


def test_the_timeline_has_a_window_and_its_pauses():
    chart = timeline(section_of(made(4000), made(4000, seed=1)))
    for view in chart.views:
        bars = [trace for trace in view.figure["data"] if trace["type"] == "bar"]
        assert 0 < sum(len(trace["x"]) for trace in bars) <= BARS
        assert all(len(trace["x"]) == len(trace["base"]) == len(trace["y"]) for trace in bars)
        assert view.figure["layout"]["shapes"]
    assert len(chart.views) == 2


def test_the_timeline_shows_teams():
    (view,) = timeline(section_of(made(method="ssp:team=piped(2)", replicas=2))).views
    layout = view.figure["layout"]
    assert layout["yaxis"]["ticktext"] == ["team 0, rank 0", "team 0, rank 1", "team 1, rank 2", "team 1, rank 3"]
    assert layout["yaxis"]["tickvals"] == [0, 1, 2, 3]
    assert [shape["y0"] for shape in layout["shapes"] if shape["type"] == "line"] == [1.5]


def test_faults_are_marked_where_they_happen():
    cluster = {
        "stragglers": {"ranks": [0], "factor": 4, "at": 0.0},
        "faults": [{"rank": 2, "at": "1500ms", "why": "it died"}, {"rank": 1, "at": 0.5, "factor": 10.0}],
    }
    run = failed(steps=80, cluster=cluster)
    assert [(one.rank, one.at, one.kind) for one in incidents(run)] == [
        (0, 0, "slow"),
        (1, 0.5, "slow"),
        (2, 1.5, "lost"),
    ]
    (view,) = timeline(section_of(run)).views
    markers = {trace["name"]: (trace["x"], trace["y"]) for trace in view.figure["data"] if trace["type"] == "scatter"}
    assert markers == {"lost": ([1.5], [2]), "slowed down": ([0, 0.5], [0, 1])}
    assert "Rank 2 is lost: it died, at 1.5 s." in view.note


def test_a_late_loss_has_a_view_of_its_own():
    run = failed(steps=4000)
    first, second = timeline(section_of(run)).views
    assert second.label.endswith("as rank 2 is lost")
    assert first.figure["layout"]["xaxis"]["range"][1] < second.figure["layout"]["xaxis"]["range"][0]


def test_nothing_at_all_can_be_drawn():
    empty = of_lines(
        [lines()[0], {"kind": "end", "end": True, "error": "too early", "error_kind": "Refused", "lost": []}]
    )
    for chart in (curves, pareto, staleness, spent, stragglers, timeline):
        assert chart(section_of(empty)).summary


@pytest.mark.parametrize(
    ("text", "value"), [("50ms", 0.05), ("2us", 2e-6), (1.5, 1.5), ("1 min", 60), ("3s", 3), ("?", 0)]
)
def test_moments_are_read_as_clusters_write_them(text, value):
    assert seconds(text) == pytest.approx(value)
