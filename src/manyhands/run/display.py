"""How a `Result` and a `Comparison` are shown: as text, as HTML in a notebook, as a DataFrame, as a figure.

    repr(result)   <Result: ssp:staleness=3 on digits: 2 workers, ...: 400 steps, 1.2 s, loss 0.0123, accuracy 0.9722>

Numbers come from the fields and from the lines of the record; weights are never shown. Figures are those of reports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from manyhands.core.errors import Refused, unknown
from manyhands.core.lag import lag_fields
from manyhands.core.record import SHAPES
from manyhands.report.charts.curves import AXES, curves
from manyhands.report.groups import sections
from manyhands.report.measures import Target, totals
from manyhands.report.pictures import on_paper
from manyhands.report.reading import RecordedRun, of_lines
from manyhands.report.result_tables import (
    html_table,
    ranking_cells,
    ranking_columns,
    result_rows,
    result_title,
    time_to_target,
)
from manyhands.report.theme import number_text, plural, seconds_text

if TYPE_CHECKING:
    from pandas import DataFrame
    from plotly.graph_objects import Figure

    from manyhands.run.compare import Comparison
    from manyhands.run.result import Result

KINDS = ("step", "evaluation", "pause", "memory")
"""The lines of a record that make a table: those of one kind have the same fields."""
MOST = 10
"""How many methods the text of a comparison names."""


# -- text and HTML ---------------------------------------------------------------------------------


def result_text(result: Result) -> str:
    """One line."""
    words = [_steps(result), seconds_text(result.seconds) + (" of virtual time" if result.world == "virtual" else "")]
    scores = {"final loss": result.final_loss, "test accuracy": result.test_accuracy}
    words += [f"{name} {number_text(value)}" for name, value in scores.items() if value is not None]
    words += [f"lost rank {rank}" for rank, _ in result.lost]
    return f"<Result: {result_title(_facts(result))}: {', '.join(words)}>"


def _steps(result: Result) -> str:
    done = result.steps if result.stopped_at is None else result.stopped_at
    return plural(result.steps, "step") if done == result.steps else f"stopped at step {done} of {result.steps}"


def result_html(result: Result) -> str:
    """A table with one row for each measure."""
    facts = _facts(result)
    lost = [(f"lost rank {rank}", why) for rank, why in result.lost]
    return html_table([*result_rows(facts).items(), *lost], caption=result_title(facts))


def _facts(result: Result) -> Mapping[str, Any]:
    """The fields and properties by name, and the method and the link, which are in the header of the record."""
    header = result.records[0]
    more = {name: header[name] for name in ("method", "link", "lag")}
    return {
        **vars(result),
        **lag_fields(result.lag),
        "samples_per_second": result.samples_per_second,
        "memory": result.memory,
        **more,
    }


def comparison_text(found: Comparison) -> str:
    """A line for each of the first methods."""
    target = "" if found.target is None else f", target {found.target}"
    lines = [f"<Comparison: {plural(len(found.rows), 'method')} on {found.task}{target}>"]
    lines += [f"{row['rank']:>4}  {row['method']}: {_score(row, found.target)}" for row in found.rows[:MOST]]
    return "\n".join([*lines, *([f"      and {len(found.rows) - MOST} more"] if len(found.rows) > MOST else [])])


def _score(row: Mapping[str, Any], target: Target | None) -> str:
    if row["failed"] == row["seeds"]:
        return f"failed: {row['failure']}"
    words = [seconds_text(row["seconds"]) if target is None else time_to_target(row)]
    words += [f"{name} {number_text(row[name])}" for name in ("accuracy", "loss") if row[name] is not None]
    return ", ".join(words)


def comparison_html(found: Comparison) -> str:
    """The ranking, with failures and notes below it."""
    title = f"{plural(len(found.rows), 'method')} on {found.task}"
    rows = [ranking_cells(row, found.target) for row in found.rows]
    below = [f"{row['method']} failed: {row['failure']}" for row in found.rows if row["failure"] is not None]
    below += [*found.notes, *([] if found.report is None else [f"report: {found.report}"])]
    target = "" if found.target is None else f", target {found.target}"
    table = html_table(rows, ranking_columns(found.target), title + target)
    return table + "".join(f"<div>{escape(line)}</div>" for line in below)


# -- tables for pandas -----------------------------------------------------------------------------


def result_frame(result: Result, kind: str) -> DataFrame:
    """The lines of one kind, a row for each."""
    if kind not in KINDS:
        raise unknown("kind of line for a table", kind, KINDS)
    columns = list(SHAPES[kind].__annotations__)
    rows = [line for line in result.records if line["kind"] == kind]
    return _frame(rows, columns).drop(columns="kind")


def comparison_frame(found: Comparison, of: str) -> DataFrame:
    """A row for each method, with medians over its seeds, or a row for each run."""
    if of not in ("methods", "runs"):
        raise unknown("table", of, ("methods", "runs"))
    return _frame(found.rows if of == "methods" else [totals(run, found.target) for run in found.runs])


def _frame(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] = ()) -> DataFrame:
    try:
        from pandas import DataFrame
    except ImportError:
        raise Refused("to_pandas needs pandas, which is not installed: pip install pandas") from None
    names = [*columns, *(name for row in rows for name in row if name not in columns)]
    return DataFrame(list(rows), columns=list(dict.fromkeys(names)))


# -- figures ---------------------------------------------------------------------------------------


def result_figure(result: Result, over: str) -> Figure:
    """Loss and accuracy of the run."""
    return curves_figure([of_lines(result.records)], over, None)


def curves_figure(runs: Sequence[RecordedRun], over: str, target: Target | None) -> Figure:
    """Loss and accuracy of these runs, of one task in one kind of time, as in a report."""
    if over not in AXES:
        raise unknown("axis", over, AXES)
    drawn = [run for run in runs if run.steps]
    if not drawn:
        raise Refused("the number of runs with a step is 0, but must be >= 1: there is nothing to plot")
    view = curves(sections(drawn, target)[0]).views[AXES.index(over)]
    from plotly.graph_objects import Figure

    return Figure(on_paper(view.figure))
