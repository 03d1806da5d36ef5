"""The record of a run: one JSON object per line. Reports, tables and plots read only these.

First line  what ran where: method, task, world, and role, rank, host (and process, when real) of everyone
then        one line per step and rank: step, rank, time, loss, samples, bytes, lag, waited; what a method decided in it
last line   how it ended
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

Line = dict[str, Any]


class Record:
    """Lines kept in memory and, if there is a folder, on disk as they come; a run that `goes_on` adds to its record."""

    def __init__(self, folder: Path | None = None, *, goes_on: bool = False) -> None:
        self.lines: list[Line] = []
        self.path: Path | None = None
        self._file: IO[str] | None = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self.path = folder / "record.jsonl"
            self._file = self.path.open("a" if goes_on else "w", encoding="utf-8")

    def write(self, line: Line) -> None:
        """Add one line; what is not a finite number becomes null."""
        self.lines.append(plain(line))
        if self._file is not None:
            self._file.write(json.dumps(self.lines[-1]) + "\n")

    def __enter__(self) -> Record:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._file is not None:
            self._file.close()


def plain(value: Any) -> Any:
    """A value that JSON can carry; a number that is not finite becomes null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return str(value) if isinstance(value, Path) else value
