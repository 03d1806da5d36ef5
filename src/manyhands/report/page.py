"""The report: one self-contained page, its numbers as CSV files beside it, and a trace of all ranks.

out/report.html      the page; it needs no network
out/data/*.csv       the numbers of each chart
out/trace.json       the timeline of all ranks, for Perfetto
out/*.png            the main figures, if asked for
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from manyhands.core.errors import refuse_unless
from manyhands.report.chart import Chart, Table
from manyhands.report.charts.curves import curves
from manyhands.report.charts.memory import memory
from manyhands.report.charts.pareto import pareto
from manyhands.report.charts.staleness import staleness
from manyhands.report.charts.stragglers import stragglers
from manyhands.report.charts.time_breakdown import spent
from manyhands.report.charts.timeline import timeline
from manyhands.report.groups import Section, sections
from manyhands.report.html import page
from manyhands.report.measures import Target
from manyhands.report.pictures import write_pictures
from manyhands.report.reading import RecordedRun
from manyhands.report.trace import write_trace

CHARTS = (curves, pareto, staleness, spent, memory, timeline, stragglers)
NAME = "report.html"
PICTURED = ("curves", "pareto", "spent")


def write_report(
    runs: Sequence[RecordedRun],
    out: Path,
    *,
    target: Target | None = None,
    title: str = "",
    notes: Sequence[str] = (),
    png: bool = False,
) -> Path:
    """Write the report of these runs into the folder `out`, and return the path of the page.

    Args:
        runs: the runs to report; those of different tasks get sections of their own.
        out: a folder, created if need be; only files of a report are written there.
        target: the accuracy or loss to reach; the report shows time, bytes and memory until then.
        title: the heading; if empty it names methods and tasks.
        notes: further remarks for the reader, such as runs that were left out.
        png: write the main figures as PNG files too; needs kaleido and a browser, else NoPictures is raised at the end.
    """
    refuse_unless(bool(runs), "the number of runs", len(runs), ">= 1")
    parts = sections(runs, target)
    charts = {section.slug: [make(section) for make in CHARTS] for section in parts}
    (out / "data").mkdir(parents=True, exist_ok=True)
    for slug, some in charts.items():
        for chart in some:
            write_csv(chart.table, out / "data" / f"{slug}-{chart.name}.csv")
    write_trace([member for section in parts for member in section.members], out / "trace.json")
    (out / NAME).write_text(page(title or _title(parts), parts, charts, notes), encoding="utf-8")
    if png:  # last, because kaleido or the browser may be missing
        write_pictures(_figures(charts), out)
    return out / NAME


def write_csv(table: Table, path: Path) -> None:
    """The numbers of one chart."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(table.columns)
        writer.writerows(table.rows())


def _figures(charts: dict[str, list[Chart]]) -> dict[str, Chart]:
    return {f"{slug}-{chart.name}": chart for slug, some in charts.items() for chart in some if chart.name in PICTURED}


def _title(parts: Sequence[Section]) -> str:
    tasks = " and ".join(dict.fromkeys(section.task for section in parts))
    methods = list(dict.fromkeys(m.run.method.partition(":")[0] for section in parts for m in section.members))
    return f"{', '.join(methods) if len(methods) <= 6 else f'{len(methods)} methods'} on {tasks}"
