"""The record of a run: one JSON object per line. Reports, tables and plots read nothing else.

First line  header: method, task, world, role, rank and host of every participant, and all it takes to repeat the run
then        one line per step and rank: step, rank, time, loss, samples, bytes, lag, and where the time went
            one line per evaluation, one per rank and pause, one per rank with its memory
last line   the result, or the error

Every field is described in docs/records.md. Lines are complete; only the last one may be cut short, by a crash.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Protocol

from manyhands.core.errors import Refused
from manyhands.core.garbage import rare_collections
from manyhands.core.record import Line, decoded, encoded

NAME = "record.jsonl"
"""The file name of a record, in the folder of its run."""
FORMAT = 2
"""Grows when a field changes its meaning. 2: every line has its `kind`; that of an error became `error_kind`."""
FORMATS = (1, FORMAT)
"""Those that reports read."""
FLUSH = 1.0
"""Seconds until a line is certainly on disk."""


class Listener(Protocol):
    """Receives every line of a record besides the file: see `adapters`."""

    def write(self, line: Line) -> None:
        """Take the next line."""

    def close(self) -> None:
        """No line follows."""


class Record:
    """Lines kept in memory and, if there is a folder, written to disk at once; a run that `goes_on`, that is, a resumed
    one, appends to its record. The listeners in `also` get every line, too."""

    def __init__(self, folder: Path | None = None, *, goes_on: bool = False, also: Sequence[Listener] = ()) -> None:
        self._also = also
        self._lines: list[Line] = []
        self._unread = bytearray()  # one buffer: thousands of small bytes objects fragment the heap
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
        """All lines so far, as a reader of the file has them. They are decoded only here, so that it costs the run no
        time. The list is always the same object, and complete when the record is closed."""
        self._read()
        return self._lines

    def write(self, line: Line) -> None:
        """Add one line."""
        self.add(encoded(line))

    def add(self, encoded_lines: bytes) -> None:
        """Add lines that are `encoded` already."""
        self._unread += encoded_lines
        if self._file is not None:
            self._file.write(encoded_lines)
            if (now := time.monotonic()) - self._flushed > FLUSH:
                self._file.flush()
                self._flushed = now
        if self._also:
            for line in decoded(encoded_lines):
                for listener in self._also:
                    listener.write(line)

    def __enter__(self) -> Record:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._file is not None:
            self._file.close()
        for listener in self._also:
            listener.close()
        self._read()  # the list that `lines` gave away gets the last lines, too

    def _read(self) -> None:
        unread, self._unread = bytes(self._unread), bytearray()
        with rare_collections(unread.count(b"\n")):
            self._lines += decoded(unread)


def _end_line(file: IO[bytes]) -> None:
    """End a line that a crash has cut short, so that the next one begins on a line of its own."""
    if file.seek(0, os.SEEK_END):
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")


def claim(out: Path, force: bool) -> Path:
    """The folder, created if need be; refused if it holds files and `force` is not given."""
    if out.exists() and not out.is_dir():
        raise Refused(f"{out} is a file, but must be a folder")
    if out.is_dir() and any(out.iterdir()) and not force:
        raise Refused(f"{out} is not empty, but must be a new folder: --force (force=True) writes into it all the same")
    out.mkdir(parents=True, exist_ok=True)
    return out
