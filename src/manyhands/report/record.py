"""The record of a run: one JSON object per line. Reports, tables and plots read nothing else.

First line  header: method, task, world, role, rank and host of every participant, and all it takes to repeat the run
then        one line per step and rank: step, rank, time, loss, samples, bytes, lag, and where the time went
            one line per evaluation, one per rank and pause, one per rank with its memory
last line   the result, or the error

Every field is described in docs/records.md. Lines are complete; only the last one may be cut short, by a crash or a
full disk. A run does not end because its record cannot be written: the lines in memory stay complete.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Protocol

from manyhands.core.errors import Refused, not_written
from manyhands.core.garbage import rare_collections
from manyhands.core.record import Line, decoded, encoded

log = logging.getLogger("manyhands")

NAME = "record.jsonl"
"""The file name of a record, in the folder of its run."""
FORMAT = 3
"""Grows when a field changes its meaning. 2: every line has its `kind`; that of an error became `error_kind`."""
FORMATS = (1, 2, FORMAT)
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
        self.failure: str = ""
        """Why the file is incomplete, if it is."""
        if folder is not None:
            self.path = folder / NAME
            self._file = _opened(self.path, goes_on)

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
            self._to_disk(self._file, encoded_lines)
        if self._also:
            for line in decoded(encoded_lines):
                for listener in self._also:
                    listener.write(line)

    def _to_disk(self, file: IO[bytes], encoded_lines: bytes) -> None:
        try:
            file.write(encoded_lines)
            if (now := time.monotonic()) - self._flushed > FLUSH:
                file.flush()
                self._flushed = now
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Write no more lines to the file; a second attempt would leave a gap in it."""
        self.failure = str(not_written(self.path, error))
        log.warning("%s; the run continues, but its record is incomplete", self.failure)
        file, self._file = self._file, None
        with suppress(OSError):  # it would write what is left in its buffer
            file.close() if file is not None else None

    def __enter__(self) -> Record:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if self._file is not None:
                self._file.close()
        except OSError as unwritten:
            self._give_up(unwritten)
        for listener in self._also:
            listener.close()
        self._read()  # the list that `lines` gave away gets the last lines, too

    def _read(self) -> None:
        unread, self._unread = bytes(self._unread), bytearray()
        with rare_collections(unread.count(b"\n")):
            self._lines += decoded(unread)


def _opened(path: Path, goes_on: bool) -> IO[bytes]:
    """The file of a record, new or one that `goes_on`; refused if there can be none: nothing has begun yet."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+b" if goes_on else "wb")
        if goes_on:
            _end_line(file)
    except OSError as error:
        raise Refused(f"{not_written(path, error)}, but a record must be: choose another folder") from None
    return file


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
