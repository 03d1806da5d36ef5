"""Reading records: a run as its lines tell it, also if they end in the middle.

A record that was gone on with has several first lines, one for each time it was started: their clocks and counts are
put one after the other.

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
from manyhands.core.lines import Line
from manyhands.report.record import FORMAT, NAME

CLOCKS = ("time", "began", "compute_began", "from", "to")
"""Fields that are moments, not durations."""


@dataclass
class Run:
    """One run, and what is wrong with its record. Steps are in the order of their ends."""

    header: Line
    steps: list[Line] = field(default_factory=list)
    evaluations: list[Line] = field(default_factory=list)
    pauses: list[Line] = field(default_factory=list)
    held: dict[int, int] = field(default_factory=dict)
    """Bytes of tensors that each rank kept."""
    end: Line | None = None
    path: Path | None = None
    warnings: list[str] = field(default_factory=list)

    @property
    def method(self) -> str:
        """As it was written, such as ssp:staleness=3."""
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
    def share(self) -> float:
        """Replicas per worker: the ranks of one replica consume the same samples."""
        return float(self.header["replicas"]) / self.workers

    @property
    def failure(self) -> str | None:
        """Why it gave no result, if it gave none."""
        if self.end is None:
            return "its record ends in the middle"
        return None if self.end.get("error") is None else str(self.end["error"])

    @property
    def lost(self) -> list[tuple[int, str]]:
        """Ranks that were lost on the way, and why."""
        return [(int(rank), str(why)) for rank, why in (self.end or {}).get("lost", [])]


def read(path: str | Path) -> Run:
    """The run of a record, or of the folder it lies in; refused if there is none."""
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
    if run.end is None:
        run.warnings.append("the record has no last line: the run was cut short, this is what it has")
    return run


def records(path: str | Path) -> list[Path]:
    """The records that a path names: one itself, that of a folder, or those of all folders in it."""
    path = Path(path)
    if not path.is_dir():
        return [path]
    found = [path / NAME] if (path / NAME).is_file() else sorted(path.rglob(NAME))
    if not found:
        raise Refused(f"{path} has no {NAME}, nor has a folder in it")
    return found


def _parsed(text: str, damaged: list[str]) -> Iterator[Line]:
    """Every line that is whole; the others are told."""
    for number, row in enumerate(text.splitlines(), 1):
        try:
            line = json.loads(row)
        except ValueError:
            line = None
        if isinstance(line, dict):
            yield line
        else:
            damaged.append(f"line {number} is damaged or cut short, and left out")


def of_lines(lines: Iterable[Line], name: str = "the record") -> Run:
    """A run of its lines, such as `result.records`."""
    run: Run | None = None
    shift = _Shift()
    for line in lines:
        if "participants" in line:
            _check(line, name)
            shift.restart()
            run = Run(line) if run is None else run
            run.header = {**line, "start": run.header.get("start", 0)}
        elif run is None:
            raise Refused(f"{name} begins with {_short(line)}, but must begin with what ran where: it is no record")
        else:
            _add(run, shift(line))
    if run is None:
        raise Refused(f"{name} is empty, but must begin with what ran where")
    run.steps.sort(key=lambda line: float(line["time"]))
    return run


def _check(header: Line, name: str) -> None:
    given = header.get("format")
    if given != FORMAT:
        raise Refused(f"{name} has format {given}, but must have {FORMAT}: it is of another version")


def _add(run: Run, line: Line) -> None:
    if "loss" in line:
        run.steps.append(line)
    elif "evaluated" in line:
        run.evaluations.append(line)
    elif "paused" in line:
        run.pauses.append(line)
    elif "held" in line:
        run.held[line["held"]] = line["bytes"]
    elif "end" in line:
        run.end = line


class _Shift:
    """Moves the moments and the counted bytes of a run that was gone on with behind what was before."""

    def __init__(self) -> None:
        self._time = self._last = 0.0
        self._bytes: dict[int, int] = {}
        self._sent: dict[int, int] = {}

    def restart(self) -> None:
        """From here on clocks begin at 0 again."""
        self._time, self._bytes = self._last, dict(self._sent)

    def __call__(self, line: Line) -> Line:
        if self._time:
            line = {**line, **{name: line[name] + self._time for name in CLOCKS if name in line}}
            if "loss" in line:
                line["bytes"] += self._bytes.get(line["rank"], 0)
        self._last = max([self._last, *(line[name] for name in CLOCKS if line.get(name) is not None)])
        if "loss" in line:
            self._sent[line["rank"]] = line["bytes"]
        return line


def _short(line: Any) -> str:
    text = json.dumps(line)
    return text if len(text) < 60 else f"{text[:57]}..."
