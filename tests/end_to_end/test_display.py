"""A Result and a Comparison show themselves: short text, HTML that is escaped, tables for pandas, figures of plotly."""

import builtins
from dataclasses import replace

import pytest
from torch.nn.functional import mse_loss

import manyhands as mh
from manyhands.report.measures import totals

from .small import losses, steps_of, task

ON = mh.Cluster(workers=2)


@pytest.fixture(scope="module")
def result():
    return mh.train(task(name="<small> & new", test=task().data, metric=mse_loss), mh.ssp(staleness=3), on=ON, steps=20)


@pytest.fixture(scope="module")
def found():
    evaluated = task(name="<small>", test=task().data, metric=lambda outputs, targets: 0.5)
    methods = [mh.bsp(), mh.ssp(), mh.hogwild()]
    hosts = mh.Cluster(workers=2, hosts=2)
    return mh.compare(evaluated, methods, on=hosts, steps=10, seeds=2, target="accuracy=0.4")


def test_a_result_is_one_line_without_weights_and_records(result):
    text = repr(result)
    title = "ssp:staleness=3 on <small> & new: 2 workers, 0 servers, a virtual cluster, seed 0"
    assert text.startswith(f"<Result: {title}: 20 steps, ") and "of virtual time, final loss " in text
    assert "\n" not in text and len(text) < 250 and "tensor" not in text


def test_a_result_says_that_it_was_stopped_and_which_ranks_were_lost(result):
    text = repr(replace(result, stopped_at=7, lost=[(1, "it died")]))
    assert "stopped at step 7 of 20" in text and text.endswith("lost rank 1>")
    assert "<td>lost rank 1</td><td>it &lt;died&gt;</td>" in replace(result, lost=[(1, "it <died>")])._repr_html_()


def test_results_are_still_compared_by_their_fields(result):
    assert result == result and result != replace(result, seed=1)


def test_the_html_of_a_result_is_a_table_that_is_escaped(result):
    html = result._repr_html_()
    assert html.startswith("<table><caption>ssp:staleness=3 on &lt;small&gt; &amp; new:") and html.endswith("</table>")
    assert "<small>" not in html and f"<td>final loss</td><td>{result.final_loss:.4f}</td>" in html


def test_the_steps_of_a_result_are_a_table(result):
    table = result.to_pandas()
    assert len(table) == len(steps_of(result)) == 40 and "kind" not in table
    assert sorted(table.sort_values("time")["loss"]) == sorted(losses(result))
    assert {"step", "rank", "time", "loss", "samples", "bytes", "lag", "wait"} <= set(table)


def test_other_lines_of_the_record_are_tables_too(result):
    assert list(result.to_pandas("memory")["held"]) == [0, 1]
    empty = result.to_pandas("evaluation")
    assert len(empty) == 0 and list(empty) == ["evaluated", "time", "accuracy"]
    with pytest.raises(mh.Refused, match="there is no kind of line for a table 'header': known are step, evaluation"):
        result.to_pandas("header")


@pytest.mark.parametrize(
    ("over", "title"), [("seconds", "virtual seconds"), ("samples", "samples"), ("bytes", "bytes")]
)
def test_a_result_is_plotted_over_time_samples_or_bytes(result, over, title):
    figure = result.plot(over)
    assert figure.layout.xaxis.title.text.startswith(title)
    assert len(figure.data[0].x) == len(figure.data[0].y) > 10


def test_a_figure_needs_an_axis_that_there_is(result):
    with pytest.raises(mh.Refused, match="there is no axis 'hours': known are seconds, samples, bytes"):
        result.plot("hours")


def test_a_comparison_is_a_few_lines_the_best_method_first(found):
    first, *lines = repr(found).splitlines()
    assert first == "<Comparison: 3 methods on <small>, target accuracy 0.4>"
    assert [line.split()[1] for line in lines] == [f"{row['method']}:" for row in found.rows]
    assert lines[-1].startswith("   3  hogwild: failed: hosts is 2") and ", accuracy 0.5000, loss " in lines[0]


def test_a_comparison_of_many_methods_names_the_first_ten(found):
    many = replace(found, rows=[{**found.rows[0], "rank": rank} for rank in range(1, 41)])
    lines = repr(many).splitlines()
    assert len(lines) == 12 and lines[-1].strip() == "and 30 more"


def test_the_html_of_a_comparison_has_every_row_and_why_one_failed(found):
    html = replace(found, notes=["a <note>"])._repr_html_()
    assert html.count("<tr>") == 1 + len(found.rows) and "<th>time to target</th>" in html
    assert "<small>" not in html and "<div>a &lt;note&gt;</div>" in html and "<div>hogwild failed: hosts is 2" in html


def test_the_ranking_and_the_runs_are_tables(found):
    ranked, runs = found.to_pandas(), found.to_pandas("runs")
    assert list(ranked["method"]) == [row["method"] for row in found.rows]
    assert list(runs["seed"]) == [run.seed for run in found.runs]
    assert runs["loss"][0] == totals(found.runs[0], found.target)["loss"]
    with pytest.raises(mh.Refused, match="there is no table 'seeds': known are methods, runs"):
        found.to_pandas("seeds")


def test_the_curves_of_a_comparison_have_the_names_of_the_methods(found):
    figure = found.plot()
    assert {line.name for line in figure.data} == {"bsp", "ssp"}, "hogwild has no steps to draw"
    with pytest.raises(mh.Refused, match="the number of runs with a step is 0"):
        replace(found, runs=[run for run in found.runs if run.method == "hogwild"]).plot()


def test_without_pandas_the_refusal_says_how_to_get_it(result, found, monkeypatch):
    real = builtins.__import__

    def without_pandas(name, *more):
        if name == "pandas":
            raise ImportError(name)
        return real(name, *more)

    monkeypatch.setattr(builtins, "__import__", without_pandas)
    for shown in (result, found):
        with pytest.raises(mh.Refused, match="pip install pandas"):
            shown.to_pandas()


@pytest.mark.parametrize("nothing", [False, None])
def test_progress_is_lines_where_output_is_no_terminal_and_nothing_without(nothing, capsys):
    mh.train(task(name="small"), mh.ssp(), on=ON, steps=10, progress=True)
    assert capsys.readouterr().err.startswith("ssp on small: 80 samples\n 10 %  loss ")
    mh.train(task(name="small"), mh.ssp(), on=ON, steps=10, progress=nothing)
    assert capsys.readouterr().err == ""


def test_progress_of_another_type_is_refused():
    with pytest.raises(mh.Refused, match="progress is yes, but must be True, False or an object with start, step and"):
        mh.train(task(), mh.ssp(), on=ON, steps=10, progress="yes")


def test_a_comparison_shows_its_progress_also_while_it_tunes(capsys):
    mh.compare(task(), {"mine": mh.bsp(), "other": mh.ssp()}, on=ON, steps=8, seeds=2, tune=True, progress=True)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        *["mine, seed 0 (tuning)"] * 3,
        *["other, seed 0 (tuning)"] * 3,
        *["mine, seed 0", "mine, seed 1", "other, seed 0", "other, seed 1"],
    ]


def test_a_comparison_has_one_display_only():
    with pytest.raises(mh.Refused, match="progress is True, but must be False if watch is given"):
        mh.compare(task(), [mh.bsp()], on=ON, steps=8, watch=object(), progress=True)
