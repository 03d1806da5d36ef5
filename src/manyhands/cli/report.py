"""`manyhands report RUN...`: one page from the records of runs."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import FlagCreatePairsOff, Positional, arg

from manyhands.cli.options import option
from manyhands.cli.output import print_json
from manyhands.cli.usage import parse
from manyhands.core.errors import Refused
from manyhands.report.record import claim

if TYPE_CHECKING:
    from manyhands.report.reading import RecordedRun

ABOUT = """Make one page from the records of runs: tables, curves, time by activity, a timeline of every rank. It needs
no network. Beside it are the numbers of each chart as CSV files, and a trace for Perfetto.

examples:
  manyhands report runs/mine
  manyhands report runs --out runs/all --target accuracy=0.95
  manyhands report runs/a/record.jsonl runs/b --png --json"""


@dataclass
class ReportOptions:
    """What `report` takes."""

    runs: Annotated[list[Path], Positional, arg(metavar="RUN...", help="records, folders of runs, or folders of such")]
    out: Annotated[Path | None, option("where the report goes", "runs/report-TIME", "DIR")] = None
    target: Annotated[str | None, option("such as accuracy=0.95 or loss=0.1", "none", "MEASURE=VALUE")] = None
    title: Annotated[str, option("the heading", "methods and tasks", "TEXT")] = ""
    png: FlagCreatePairsOff[Annotated[bool, option("write the main figures as PNG files too", "no")]] = False
    force: FlagCreatePairsOff[Annotated[bool, option("write into a folder that is not empty", "no")]] = False
    json: FlagCreatePairsOff[Annotated[bool, option("print one JSON object instead of the path", "no")]] = False


def run(argv: Sequence[str]) -> int:
    """Read the records, write the report, print its path."""
    options = parse(ReportOptions, argv, "report", ABOUT)
    if not options.runs:
        raise Refused("name a record, or a folder with one: manyhands report RUN... (see manyhands report --help)")
    from manyhands.report.measures import parse_target, totals
    from manyhands.report.page import NAME, write_report
    from manyhands.report.pictures import NoPictures

    target = None if options.target is None else parse_target(options.target)
    out = folder(options.out, options.force)
    runs, left_out = gathered(options.runs)
    trouble = None
    try:
        page = write_report(runs, out, target=target, title=options.title, notes=left_out, png=options.png)
    except NoPictures as error:
        page, trouble = out / NAME, error
    if options.json:
        rows = [{"record": one.path, **totals(one, target), "warnings": one.warnings} for one in runs]
        print_json({"report": page, "target": options.target, "runs": rows, "left_out": left_out})
    else:
        print(page)
    if trouble is not None:
        raise trouble
    return 0


def folder(chosen: Path | None, force: bool) -> Path:
    """The folder of the report; one that is not empty is refused without --force."""
    return Path("runs", time.strftime("report-%Y%m%d-%H%M%S")) if chosen is None else claim(chosen, force)


def gathered(paths: Sequence[Path]) -> tuple[list[RecordedRun], list[str]]:
    """The runs of all records. Damage is printed, and records that cannot be read at all are left out."""
    from manyhands.report.reading import read, records

    found, left_out = [], []
    for record in dict.fromkeys(record for path in paths for record in records(path)):
        try:
            found.append(read(record))
        except Refused as refusal:
            left_out.append(f"left out: {refusal}")
    said = left_out + [f"{one.path}: {text}" for one in found for text in one.warnings]
    for text in said:
        print(f"manyhands: {text}", file=sys.stderr)
    if not found:
        raise Refused("there is no record to report: none of those named can be read")
    return found, left_out
