"""The record of a script: the launching process writes what the ranks send (run/loop_record.py).

    rank 0   header, lines, end  --+
    rank 1           lines, end  --+-->  DIR/record.jsonl              header, lines, end: the same as of `mh.train`
             (joins again)       ----->  DIR/join-2/record.jsonl

The lead's header may arrive after lines of other ranks, so these wait for it. Each join of a script is a run of its
own, with a record of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from manyhands.core.errors import ManyhandsError, Refused
from manyhands.core.record import Line, decoded
from manyhands.report.adapters import adapters as listeners
from manyhands.report.adapters import refuse_unknown
from manyhands.report.machine import provenance
from manyhands.report.progress import Progress
from manyhands.report.record import FORMAT, NAME, Record
from manyhands.run.result import final_loss
from manyhands.run.train import error_footer
from manyhands.runtime.launch.launch import NO_SETTINGS, run_script
from manyhands.runtime.launch.script_settings import ScriptSettings


class ScriptFailed(ManyhandsError):
    """A script ended with an error that no rank has reported."""


class JoinRecord:
    """The record of one join of a script.

    Args:
        folder: where it is written.
        facts: fields of the header that the ranks do not know.
        adapters: where it is also sent.
        progress: called for every line.
    """

    def __init__(
        self, folder: Path, facts: Mapping[str, Any], adapters: Sequence[str] = (), progress: Progress | None = None
    ) -> None:
        self._folder, self._facts = folder, facts
        self._adapters, self._progress = adapters, progress
        self._record: Record | None = None
        self._early = bytearray()
        self._ends: list[Line] = []
        self._result: Line = {}
        self._began = time.perf_counter()

    @property
    def has_begun(self) -> bool:
        """Whether there is a header."""
        return self._record is not None

    @property
    def has_result(self) -> bool:
        """Whether training has ended well."""
        return any("weights_sha256" in line for line in self._ends)

    def add(self, kind: str, parcel: bytes) -> None:
        """Take what a rank has sent."""
        if kind == "lines":
            self._add(parcel)
            return
        (line,) = decoded(parcel)
        if kind == "header":
            self._begin(line)
        elif kind == "rank_end":
            self._ends.append(line)
        else:
            self._result |= {name: value for name, value in line.items() if name != "kind"}

    def _begin(self, header: Line) -> None:
        self._record = Record(self._folder, also=listeners(self._adapters, self._folder))
        self._share = header["replicas"] / header["workers"]
        self._record.write({**header, "format": FORMAT, **self._facts, "made": provenance()})
        if self._progress is not None:
            total = (header["steps"] or 0) * header["replicas"] * header["batch_size"]
            self._progress.start(total, self._facts["task"])
        self._add(bytes(self._early))

    def _add(self, parcel: bytes) -> None:
        if self._record is None:
            self._early += parcel
            return
        self._record.add(parcel)
        if self._progress is not None:
            for line in decoded(parcel):
                self._progress.step({**line, "samples": line.get("samples", 0) * self._share})

    def close(self, error: BaseException | None, lost: Sequence[tuple[int, str]] = ()) -> None:
        """Write the last line: the result, or the error."""
        if self._progress is not None:
            self._progress.stop()
        if self._record is not None:
            with self._record as record:
                record.write(self._footer(record.lines, lost) if error is None else error_footer(error))

    def _footer(self, lines: Sequence[Line], lost: Sequence[tuple[int, str]]) -> Line:
        steps = sorted((line for line in lines if line["kind"] == "step"), key=lambda line: float(line["time"]))
        return {
            "kind": "end",
            "end": True,
            "seconds": max(line["seconds"] for line in self._ends),
            "wall_seconds": time.perf_counter() - self._began,
            "samples": round(sum(line["samples"] for line in steps) * self._share),
            "final_loss": final_loss(steps),
            "test_accuracy": None,
            "bytes_sent": sum(line["bytes_sent"] for line in self._ends),
            "weights_sha256": next(line["weights_sha256"] for line in self._ends if "weights_sha256" in line),
            **self._result,
            "lost": list(lost),
        }


class ScriptRecord:
    """The records of all joins of a script.

    Args:
        out: the folder of the first one; the next ones are in folders below it.
        make: makes the record of a join, for its folder.
    """

    def __init__(self, out: Path, make: Callable[[Path], JoinRecord]) -> None:
        self._out, self._make = out, make
        self._joins: dict[int, JoinRecord] = {0: make(out)}
        self.error: BaseException | None = None
        """Why the script failed, known at its end."""

    def lines(self, rows: Any) -> None:
        """Take what a rank has sent for one of its joins."""
        session, kind, parcel = rows
        if session not in self._joins:
            self._joins[session] = self._make(self._out / f"join-{session + 1}")
        self._joins[session].add(kind, parcel)

    def ended(self, code: int, error: BaseException | None, lost: Sequence[tuple[int, str]]) -> None:
        """All ranks have ended; what ended the run counts for the last join, the others are complete."""
        if error is None and code:
            error = ScriptFailed(f"the script ended with exit code {code}")
        *former, last = (self._joins[session] for session in sorted(self._joins))
        for join in former:
            join.close(None if join.has_result else _incomplete())
        self.error = error or (None if last.has_result else _incomplete())
        last.close(self.error, lost)

    def interrupted(self, error: BaseException) -> None:
        """The run was stopped from outside."""
        self.ended(1, error, ())


def _incomplete() -> ScriptFailed:
    return ScriptFailed("the script ended without training: it has called neither step nor prepare")


def run_recorded(
    script: Path,
    arguments: Sequence[str],
    out: Path,
    *,
    adapters: Sequence[str] = (),
    progress: Progress | None = None,
    settings: ScriptSettings = NO_SETTINGS,
    link: str = "shm",
    **how: Any,
) -> tuple[int, BaseException | None]:
    """Run a script as `run_script` does, and write its record; the exit code, and why it gave no result."""
    refuse_unknown(adapters)
    _clear(out)
    facts = {"task": script.name, "world": "real", "link": link, "cluster": None}
    record = ScriptRecord(out, lambda folder: JoinRecord(folder, facts, adapters, progress))
    try:
        code = run_script(str(script), arguments, link=link, settings=settings, observer=record, **how)
    except BaseException as error:
        record.interrupted(error)
        raise
    finally:
        with suppress(OSError):  # it is not empty
            out.rmdir()
    return code, record.error


def _clear(out: Path) -> None:
    """Make the folder, and remove records of an earlier run: this one may end before it has any."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        for old in (out / NAME, *out.glob(f"join-*/{NAME}")):
            old.unlink(missing_ok=True)
    except OSError as error:
        raise Refused(f"out is {out}, but must be a folder that can be written: {error.strerror}") from None
