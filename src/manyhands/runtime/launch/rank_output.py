"""The output of ranks, line by line: no line of one rank is mixed with one of another.

    rank 1 --pipe--> OutputLines --> "[1] text" --> stdout or stderr of the launcher
                                 --> "text"     --> DIR/rank1.log

A line is printed when it is complete. The states of a progress bar, which end with a carriage return, are lines too;
at most one a second is printed, the newest.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from manyhands.core.errors import Refused
from manyhands.runtime.membership.event_loop import EventLoop

log = logging.getLogger("manyhands")

LONGEST = 16 * 2**20
"""Bytes after which a line is broken."""
PAUSE = 1.0
"""Seconds between two states of a progress bar."""
CHUNK = 2**16
LINE_END = re.compile(rb"\r*\n|\r(?=[^\r\n])")
"""A carriage return is the end of a state only if no newline follows."""


class OutputLines:
    """Splits the output of a process into lines."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[tuple[bytes, bool]]:
        """The lines that `data` completes, and whether each is the state of a progress bar."""
        may_end = b"\n" in data or b"\r" in data or self._rest.endswith(b"\r")
        self._rest += data
        if len(self._rest) > LONGEST and not may_end:
            return [(self.rest(), False)]
        if not may_end:
            return []
        text, lines, at = bytes(self._rest), [], 0
        for end in LINE_END.finditer(text):
            lines.append((text[at : end.start()], end[0] == b"\r"))
            at = end.end()
        self._rest = bytearray(text[at:])
        return [(line, is_state) for line, is_state in lines if line.strip() or not is_state]

    def rest(self) -> bytes:
        """The last line, if it has no end."""
        text, self._rest = bytes(self._rest.rstrip(b"\r")), bytearray()
        return text


class RankStream:
    """Prints what one rank writes to its stdout or stderr.

    Args:
        pipe: the end of the pipe that is read.
        target: where lines are printed.
        prefix: comes before each line.
        record: the rank's log file, if there is one.
        loop: its thread reads and prints.
    """

    def __init__(self, pipe: int, target: BinaryIO, prefix: bytes, record: RankLog | None, loop: EventLoop) -> None:
        self._pipe, self._target, self._prefix = pipe, target, prefix
        self._record, self._loop = record, loop
        self._lines = OutputLines()
        self._state: bytes | None = None
        self._due = 0.0
        self._is_open = True
        os.set_blocking(pipe, False)

    def fileno(self) -> int:
        return self._pipe

    def read(self) -> bool:
        """Print what has arrived; whether there was anything."""
        try:
            data = os.read(self._pipe, CHUNK) if self._is_open else b""
        except BlockingIOError:
            return False
        if not data:
            self.end()
            return False
        lines = []
        for line, is_state in self._lines.feed(data):
            self._state = line if is_state else None
            if not is_state:
                lines.append(line)
            elif time.monotonic() >= self._due:
                lines.append(self._take_state())
        self._print(lines)
        return True

    def drain(self) -> None:
        """Print what has arrived, and end: a process that the rank has left behind may keep the pipe open."""
        while self.read():
            pass
        self.end()

    def end(self) -> None:
        """Print the last line, and close the pipe; a second call does nothing."""
        if self._is_open:
            rest = self._lines.rest()
            self._print([rest] if rest else [] if self._state is None else [self._state])
        if self._is_open:
            self._close()

    def _take_state(self) -> bytes:
        """The newest state of a progress bar; those of the next second are printed at its end."""
        assert self._state is not None
        state, self._state = self._state, None
        self._due = time.monotonic() + PAUSE
        self._loop.later(PAUSE, self._print_state)
        return state

    def _print_state(self) -> None:
        if self._is_open and self._state is not None:
            self._print([self._take_state()])

    def _print(self, lines: list[bytes]) -> None:
        """Write to the launcher's output; if that is closed, close the pipe too, so that the rank notices."""
        if not lines:
            return
        if self._record is not None:
            self._record.write(lines)
        try:
            self._target.write(b"".join([b"%b%b\n" % (self._prefix, line) for line in lines]))
            self._target.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._target.fileno())
            self._close()

    def _close(self) -> None:
        self._is_open = False
        self._loop.remove(self)
        os.close(self._pipe)


class RankLog:
    """A file with the lines of one rank, its stdout and its stderr."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("wb", buffering=0)

    def write(self, lines: list[bytes]) -> None:
        """Add lines; if the file cannot be written, the run continues without it."""
        try:
            if not self._file.closed:
                self._file.write(b"".join([b"%b\n" % line for line in lines]))
        except OSError as error:
            log.warning("%s cannot be written: %s", self._path, error.strerror)
            self._file.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class RankOutput:
    """The output of all ranks of a job, printed by a thread of its own.

    Args:
        ranks: how many.
        prefix: whether lines begin with their rank.
        folder: where each rank gets a log file; None for no such files.
        prints: whether lines are printed at all.
    """

    def __init__(self, ranks: int, *, prefix: bool, folder: Path | None, prints: bool = True) -> None:
        self._prefix = prefix
        self._void = None if prints else open(os.devnull, "wb")  # noqa: SIM115
        self._logs = [] if folder is None else _logs(folder, ranks)
        self._streams: list[RankStream] = []
        self._loop = EventLoop()
        self._thread = self._loop.start("manyhands-output")

    @contextmanager
    def pipes(self, rank: int) -> Iterator[tuple[int, int]]:
        """The stdout and the stderr for this rank's process, open while it is being started."""
        out, err = (self._pipe(rank, self._void or target.buffer) for target in (sys.stdout, sys.stderr))
        try:
            yield out, err
        finally:
            os.close(out)
            os.close(err)

    def _pipe(self, rank: int, target: BinaryIO) -> int:
        ours, theirs = os.pipe()
        prefix, record = f"[{rank}] ".encode() if self._prefix else b"", self._logs[rank] if self._logs else None
        stream = RankStream(ours, target, prefix, record, self._loop)
        self._streams.append(stream)
        self._loop.post(lambda: self._loop.on_readable(stream, stream.read))
        return theirs

    def close(self) -> None:
        """All ranks have ended: print what they have written."""
        for stream in self._streams:
            self._loop.post(stream.drain)
        self._loop.stop()
        self._thread.join()
        self._loop.close()
        for record in self._logs:
            record.close()
        if self._void is not None:
            self._void.close()


def _logs(folder: Path, ranks: int) -> list[RankLog]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return [RankLog(folder / f"rank{rank}.log") for rank in range(ranks)]
    except OSError as error:
        raise Refused(f"log_dir is {folder}, but must be a folder that can be written: {error.strerror}") from None
