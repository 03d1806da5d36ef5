"""The record of a run: one JSON object per line. Reports, tables and plots read only these.

First line  what ran where: method, task, world, role, rank and host of everyone, and all it takes to repeat it
then        one line per step and rank: step, rank, time, loss, samples, bytes, lag, and where the time went
            one line per evaluation on the way, and per rank and pause
last line   how it ended, also if it failed

Every field is described in docs/records.md. Lines are complete or, after a crash, the last one is cut short.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Protocol

from manyhands.core.errors import Refused
from manyhands.core.lines import Line, decoded, encoded

NAME = "record.jsonl"
"""Of a record, in the folder of its run."""
FORMAT = 1
"""Grows when a field changes its meaning."""
FLUSH = 1.0
"""Seconds until a line is certainly on disk."""


class Listener(Protocol):
    """Whoever is told the lines besides: see `adapters`."""

    def write(self, line: Line) -> None:
        """One line more."""

    def close(self) -> None:
        """The last line has come."""


class Record:
    """Lines kept in memory and, if there is a folder, on disk as they come; a run that `goes_on` adds to its record.
    `also` are told every line too."""

    def __init__(self, folder: Path | None = None, *, goes_on: bool = False, also: Sequence[Listener] = ()) -> None:
        self._also = also
        self._lines: list[Line] = []
        self._unread = bytearray()  # one piece: an encoded line by itself may keep kilobytes from being used again
        self.path: Path | None = None
        self._flushed = 0.0
        self._file: IO[bytes] | None = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self.path = folder / NAME
            self._file = self.path.open("a+b" if goes_on else "wb")
            if goes_on:
                _end_line(self._file)

    @property
    def lines(self) -> list[Line]:
        """All lines so far, as a reader of the file has them. They are kept encoded until somebody asks: a run has
        better things to do. The list is always the same one, and complete when the record is closed."""
        self._read()
        return self._lines

    def write(self, line: Line) -> None:
        """Add one line."""
        self.add(encoded(line))

    def add(self, parcel: bytes) -> None:
        """Add lines that are `encoded` already."""
        self._unread += parcel
        if self._file is not None:
            self._file.write(parcel)
            if (now := time.monotonic()) - self._flushed > FLUSH:
                self._file.flush()
                self._flushed = now
        if self._also:
            for line in decoded(parcel):
                for listener in self._also:
                    listener.write(line)

    def __enter__(self) -> Record:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._file is not None:
            self._file.close()
        for listener in self._also:
            listener.close()
        self._read()  # whoever has the list has the last line, too

    def _read(self) -> None:
        unread, self._unread = bytes(self._unread), bytearray()
        self._lines += decoded(unread)


def _end_line(file: IO[bytes]) -> None:
    """A line that a crash has cut short shall not swallow the next one."""
    if file.seek(0, os.SEEK_END):
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")


def claim(out: Path, force: bool) -> Path:
    """A folder that may be written in."""
    if out.exists() and not out.is_dir():
        raise Refused(f"{out} is a file, but must be a folder")
    if out.is_dir() and any(out.iterdir()) and not force:
        raise Refused(f"{out} is not empty, but must be a new folder: --force (force=True) writes into it all the same")
    out.mkdir(parents=True, exist_ok=True)
    return out
