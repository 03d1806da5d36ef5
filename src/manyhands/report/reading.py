"""Reading records: the lines of a run in order, also of a record that is cut short.

A resumed run has several headers in its record, one for each time it was started. Their clocks and counts are
concatenated.

    header  steps, evaluations, pauses  end   |   header  steps ...  end
            0 ................. 3.2 s                     0 ........ 1.1 s     read as 3.2 s .... 4.3 s
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from manyhands.core.errors import Refused
from manyhands.core.record import SHAPES, EndLine, EvaluationLine, Line, MemoryLine, NumbersLine, PauseLine, StepLine
from manyhands.report.record import FORMATS, NAME

CLOCKS = ("time", "began", "compute_began", "from", "to")
"""Fields that are moments, not durations."""
KIND_BY_FIELD = {
    "participants": "header",
    "loss": "step",
    "evaluated": "evaluation",
    "paused": "pause",
    "held": "memory",
    "end": "end",
}
"""Records of format 1 have no kinds: a field that only lines of one kind have."""

COUNTS_LAGS = 3
"""The format from which on all lags are counted alike."""
OLD_LAGS = (
    "the record has format {}: its lags may be clocks, those of dropped gradients, or 0 though they were not counted"
)


@dataclass
class RecordedRun:
    """One run, and what is wrong with its record. Steps are in the order of their ends."""

    header: Line
    steps: list[StepLine] = field(default_factory=list)
    evaluations: list[EvaluationLine] = field(default_factory=list)
    pauses: list[PauseLine] = field(default_factory=list)
    numbers: list[NumbersLine] = field(default_factory=list)
    memory: dict[int, int] = field(default_factory=dict)
    """Bytes of tensors that each rank kept between steps."""
    memory_lines: dict[int, MemoryLine] = field(default_factory=dict)
    """What they were for, by rank."""
    end: EndLine | None = None
    path: Path | None = None
    warnings: list[str] = field(default_factory=list)

    @property
    def method(self) -> str:
        """The recipe as the command line writes it, such as ssp:staleness=3."""
        return str(self.header.get("method") or self.header.get("strategy", "unknown"))

    @property
    def task(self) -> str:
        return str(self.header.get("task"))

    @property
    def seed(self) -> int:
        return int(self.header.get("seed", 0))

    @property
    def workers(self) -> int:
        return int(self.header["workers"])

    @property
    def team_size(self) -> int:
        """How many consecutive ranks hold one copy of the model together."""
        return self.workers // max(1, int(self.header["replicas"]))

    def rank_name(self, rank: int) -> str:
        """What a rank is called; a member of a team with the number of its team."""
        in_team = self.team_size > 1 and rank < self.workers
        return f"team {rank // self.team_size}, rank {rank}" if in_team else f"rank {rank}"

    @property
    def share(self) -> float:
        """Replicas per worker: the ranks of one replica consume the same samples."""
        return float(self.header["replicas"]) / self.workers

    @property
    def failure(self) -> str | None:
        """Why the run gave no result; None if it gave one."""
        if self.end is None:
            return "its record ends in the middle"
        return None if self.end.get("error") is None else str(self.end["error"])

    @property
    def lost(self) -> list[tuple[int, str]]:
        """The lost ranks, each with the reason."""
        return [] if self.end is None else [(int(rank), str(why)) for rank, why in self.end.get("lost", [])]


def read(path: str | Path) -> RecordedRun:
    """The run of a record, or of the folder that holds it; refused if there is none."""
    path = Path(path)
    path = path / NAME if path.is_dir() else path
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise Refused(f"cannot read the record {path}: {error.strerror}") from None
    damaged: list[str] = []
    run = of_lines(_parsed(text, damaged), str(path))
    run.path = path
    run.warnings += damaged
    if run.header["format"] < COUNTS_LAGS:
        run.warnings.append(OLD_LAGS.format(run.header["format"]))
    if run.end is None:
        run.warnings.append(
            "the record has no last line: the run was cut short, and this report shows what was recorded"
        )
    return run


def records(path: str | Path) -> list[Path]:
    """The records that a path names: one itself, that of a folder with those of later joins, or all in its folders."""
    path = Path(path)
    if not path.is_dir():
        return [path]
    whole = (path / NAME).is_file()
    found = [path / NAME, *sorted(path.glob(f"join-*/{NAME}"))] if whole else sorted(path.rglob(NAME))
    if not found:
        raise Refused(f"{path} has no {NAME}, nor has a folder in it")
    return found


def _parsed(text: str, damaged: list[str]) -> Iterator[Line]:
    """Every complete line; for each of the others a warning is added to `damaged`."""
    for number, row in enumerate(text.splitlines(), 1):
        try:
            line = json.loads(row)
        except ValueError:
            line = None
        if isinstance(line, dict):
            yield line
        else:
            damaged.append(f"line {number} is damaged or cut short, and left out")


def of_lines(lines: Iterable[Line], name: str = "the record") -> RecordedRun:
    """The run that these lines describe, such as `result.records`."""
    run: RecordedRun | None = None
    offsets = _Offsets()
    for line in map(with_kind, lines):
        if line["kind"] == "header":
            _check(line, name)
            offsets.restart()
            run = RecordedRun(line) if run is None else run
            run.header = {**line, "start": run.header.get("start", 0)}
        elif run is None:
            raise Refused(f"{name} begins with {_short(line)}, but must begin with a header: it is no record")
        else:
            _add(run, offsets.applied(line))
    if run is None:
        raise Refused(f"{name} is empty, but must begin with a header")
    run.steps.sort(key=lambda line: line["time"])
    return run


def with_kind(line: Line) -> Line:
    """The line with its `kind`, also if it is of format 1, in which `kind` was the class of an error."""
    if line.get("kind") in SHAPES:
        return line
    kind = next((kind for key, kind in KIND_BY_FIELD.items() if key in line), None)
    return {**line, "kind": kind, "error_kind": line["kind"]} if "kind" in line else {**line, "kind": kind}


def _check(header: Line, name: str) -> None:
    given = header.get("format")
    if given not in FORMATS:
        known = " or ".join(map(str, FORMATS))
        raise Refused(f"{name} has format {given}, but must have {known}: it is of another version")


def _add(run: RecordedRun, line: Any) -> None:
    match line["kind"]:
        case "step":
            run.steps.append(line)
        case "evaluation":
            run.evaluations.append(line)
        case "pause":
            run.pauses.append(line)
        case "numbers":
            run.numbers.append(line)
        case "memory":
            run.memory[line["held"]], run.memory_lines[line["held"]] = line["bytes"], line
        case "end":
            run.end = line


class _Offsets:
    """Adds to the clocks and byte counts of a resumed run what they were when the run before it ended."""

    def __init__(self) -> None:
        self._time = self._last = 0.0
        self._bytes: dict[int, int] = {}
        self._sent: dict[int, int] = {}

    def restart(self) -> None:
        """The next line is from a process whose clocks began at 0."""
        self._time, self._bytes = self._last, dict(self._sent)

    def applied(self, line: Line) -> Line:
        """The line on the clock of the whole record."""
        if self._time:
            line = {**line, **{name: line[name] + self._time for name in CLOCKS if name in line}}
            if line["kind"] == "step":
                line["bytes"] += self._bytes.get(line["rank"], 0)
        self._last = max([self._last, *(line[name] for name in CLOCKS if line.get(name) is not None)])
        if line["kind"] == "step":
            self._sent[line["rank"]] = line["bytes"]
        return line


def _short(line: Any) -> str:
    text = json.dumps(line)
    return text if len(text) < 60 else f"{text[:57]}..."
