"""Measures: what is computed from the lines of a run: curves, time to target, time by activity, stragglers.

Time here is training time: pauses for an evaluation or a checkpoint are left out.

    rank 0   ====step====|.......... pause ..........|====step====
    rank 1   =========step=========|..... pause .....|===step===
                                   [    left out     ]    `bounded`: all workers wait for the slowest one in any case
                              [       left out       ]    else from the mean of `from`, weighted by steps taken

Samples are those of the whole job. Bytes are those of all ranks: those of servers are known only as a total at the end,
so they are spread over the steps in proportion to the workers' bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyhands.core.errors import Refused, refuse_unless, unknown
from manyhands.core.lag import LagSummary, lag_fields, lag_summary
from manyhands.core.record import PauseLine, StepLine
from manyhands.report.reading import RecordedRun

WINDOW = 0.05
"""The share of a run that a loss is averaged over: the loss of one mini-batch is too noisy."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Target:
    """The value to reach: an `accuracy` of at least, or a `loss` of at most, `value`."""

    what: str
    value: float

    def __str__(self) -> str:
        return f"{self.what} {self.value:g}"

    def reached(self, values: Floats) -> NDArray[np.bool]:
        """Which of these values reach it."""
        return values >= self.value if self.what == "accuracy" else values <= self.value


BOUNDS: dict[str, tuple[str, Callable[[float], bool]]] = {
    "accuracy": ("> 0 and <= 1", lambda value: 0 < value <= 1),
    "loss": ("> 0 and finite", lambda value: 0 < value < math.inf),
}
"""The measures that can be a target, each with the range of its values."""


def parse_target(text: str) -> Target:
    """The target of a text such as accuracy=0.95 or loss=0.1."""
    what, equals, given = (word.strip() for word in text.partition("="))
    if what not in BOUNDS:
        raise unknown("measure for a target", what, BOUNDS)
    if not equals or not given:
        raise Refused(f"target is {text!r}, but must be {what}=VALUE")
    try:
        value = float(given)
    except ValueError:
        raise Refused(f"{what} of the target is {given!r}, but must be a number") from None
    bound, holds = BOUNDS[what]
    refuse_unless(holds(value), f"{what} of the target", f"{value:g}", bound)
    return Target(what, value)


@dataclass(frozen=True)
class Curve:
    """A measure at some moments, each in training seconds, samples and bytes."""

    seconds: Floats
    samples: Floats
    bytes: Floats
    values: Floats

    def first(self, target: Target) -> dict[str, float] | None:
        """The first point at which the target was reached; None if it never was."""
        found = np.flatnonzero(target.reached(self.values))
        if not found.size:
            return None
        return {name: float(getattr(self, name)[found[0]]) for name in ("seconds", "samples", "bytes")}


class Measures:
    """Curves and totals of one run."""

    def __init__(self, run: RecordedRun) -> None:
        self.run = run
        self._ends = np.array([line["time"] for line in run.steps], float)

    # -- the three axes ---------------------------------------------------------------------------

    @cached_property
    def pauses(self) -> list[tuple[float, float]]:
        """The intervals that are left out: no worker trained, because of an evaluation or a checkpoint."""
        by_rank: dict[int, list[PauseLine]] = {}
        for line in self.run.pauses:
            by_rank.setdefault(line["paused"], []).append(line)
        most = max(map(len, by_rank.values()), default=0)
        together = [list(column) for column in zip(*(r for r in by_rank.values() if len(r) == most), strict=True)]
        spans = [(self._begin(pauses), min(float(p["to"]) for p in pauses)) for pauses in together]
        return [(start, stop) for start, stop in spans if stop > start]

    def _begin(self, pauses: Sequence[PauseLine]) -> float:
        """When a pause begins for the job as a whole."""
        if self.run.header.get("bounded", True):
            return max(float(one["from"]) for one in pauses)
        work = [len(self.by_rank.get(one["paused"], ())) for one in pauses]
        return sum(n * float(one["from"]) for n, one in zip(work, pauses, strict=True)) / max(1, sum(work))

    def clock(self, time: Floats | float) -> Floats:
        """Training seconds at these moments."""
        at = np.asarray(time, float)
        for start, stop in reversed(self.pauses):
            at = at - (np.clip(at, start, stop) - start)
        return at

    def _at(self, time: Floats) -> tuple[Floats, Floats, Floats]:
        """Training seconds, samples and bytes at these moments."""
        done = np.searchsorted(self._ends, time, side="right")
        samples, sent = (np.concatenate([[0.0], column])[done] for column in (self._samples, self._bytes))
        return self.clock(time), samples, sent

    @cached_property
    def _samples(self) -> Floats:
        return np.cumsum([line["samples"] for line in self.run.steps], dtype=float) * self.run.share

    @cached_property
    def _bytes(self) -> Floats:
        """Sent by all ranks until each step, without the bytes of pauses."""
        pauses = sorted(self.run.pauses, key=lambda line: float(line["to"]))
        sent: dict[int, float] = {}
        paused: dict[int, float] = {}
        total, ended, column = 0.0, 0, []
        for line in self.run.steps:
            while ended < len(pauses) and (pause := pauses[ended])["to"] <= line["time"]:
                paused[pause["paused"]] = paused.get(pause["paused"], 0) + pause["bytes"]
                ended += 1
            now = line["bytes"] - paused.get(line["rank"], 0)
            total += now - sent.get(line["rank"], 0)
            sent[line["rank"]] = now
            column.append(total)
        return np.array(column, float) * self._server_factor(total, sum(paused.values()))

    def _server_factor(self, workers: float, paused: float) -> float:
        """Bytes that all ranks sent over bytes that workers sent."""
        if not self.run.header.get("servers") or not workers or self.run.end is None:
            return 1.0
        return max(1.0, (float(self.run.end.get("bytes_sent") or 0) - paused) / workers)

    # -- curves -----------------------------------------------------------------------------------

    @cached_property
    def loss(self) -> Curve:
        """The loss of mini-batches, averaged over a moving window."""
        rows = [(n, line["loss"]) for n, line in enumerate(self.run.steps) if line["loss"] is not None]
        indices, losses = _columns(rows)
        window = max(1, round(WINDOW * len(losses)))
        total = np.concatenate([[0.0], np.cumsum(losses)])
        last = np.arange(1, len(losses) + 1)
        first = np.maximum(0, last - window)
        return Curve(*self._at(self._ends[indices.astype(int)]), (total[last] - total[first]) / (last - first))

    @cached_property
    def accuracy(self) -> Curve:
        """The results of evaluations; the last one is that of the final weights."""
        rows = [(line["time"], line["accuracy"]) for line in self.run.evaluations if line["accuracy"] is not None]
        final = None if self.run.end is None else self.run.end.get("test_accuracy")
        if final is not None and len(self._ends):
            rows.append((float(self._ends[-1]), final))
        times, found = _columns(rows)
        return Curve(*self._at(times), found)

    def to_target(self, target: Target) -> dict[str, float] | None:
        """Seconds, samples and bytes until the target was reached; None if it never was."""
        return (self.accuracy if target.what == "accuracy" else self.loss).first(target)

    # -- totals -----------------------------------------------------------------------------------

    @property
    def seconds(self) -> float:
        """Training time from the beginning to the end of the last step."""
        return float(self.clock(self._ends[-1])) if len(self._ends) else 0.0

    @property
    def samples(self) -> float:
        return float(self._samples[-1]) if len(self._ends) else 0.0

    @property
    def bytes(self) -> float:
        return float(self._bytes[-1]) if len(self._ends) else 0.0

    @property
    def lags(self) -> list[int]:
        """The lag of each step in which that of an applied gradient became known."""
        return [line["lag"] for line in self.run.steps if line["lag"] is not None]

    @cached_property
    def lag(self) -> LagSummary:
        return lag_summary(self.run.steps)

    @property
    def memory(self) -> int:
        """Bytes of tensors between steps, of the rank with the most."""
        return max(self.run.memory.values(), default=0)

    # -- ranks ------------------------------------------------------------------------------------

    @cached_property
    def by_rank(self) -> dict[int, list[StepLine]]:
        """The steps of each rank."""
        rows: dict[int, list[StepLine]] = {}
        for line in self.run.steps:
            rows.setdefault(line["rank"], []).append(line)
        return dict(sorted(rows.items()))

    def spent(self) -> dict[int, dict[str, float]]:
        """Seconds of each rank by activity: compute, encode, wait, send, other."""
        found = {}
        for rank, lines in self.by_rank.items():
            parts = {name: float(sum(line[name] for line in lines)) for name in ("compute", "encode", "wait", "send")}
            inside = sum(line["time"] - line["began"] for line in lines)
            found[rank] = {**parts, "other": max(0.0, inside - sum(parts.values()))}
        return found

    def waiting(self) -> float:
        """The share of the workers' time in which they wait for other ranks."""
        rows = self.spent().values()
        total = sum(sum(row.values()) for row in rows)
        return sum(row["wait"] for row in rows) / total if total else 0.0

    def stragglers(self) -> dict[int, float]:
        """Each rank's median compute time, relative to the median of all ranks."""
        own = {rank: median(line["compute"] for line in lines) for rank, lines in self.by_rank.items()}
        group = median(own.values()) if own else 0.0
        return {rank: value / group if group else 1.0 for rank, value in own.items()}


def totals(run: RecordedRun, target: Target | None = None) -> dict[str, Any]:
    """One row of a table: the totals of a run."""
    m = Measures(run)
    final = None if run.end is None else run.end.get("test_accuracy")
    reached = None if target is None else m.to_target(target)
    return {
        "method": run.method,
        "seed": run.seed,
        "accuracy": final if final is not None else _last(m.accuracy.values),
        "loss": _last(m.loss.values),
        "seconds": m.seconds,
        "samples": m.samples,
        "samples_per_second": m.samples / m.seconds if m.seconds else None,
        "bytes": m.bytes,
        **lag_fields(m.lag),
        "waiting": m.waiting(),
        "memory": m.memory,
        "seconds_to_target": None if reached is None else reached["seconds"],
        "samples_to_target": None if reached is None else reached["samples"],
        "bytes_to_target": None if reached is None else reached["bytes"],
        "failure": run.failure,
    }


def _columns(pairs: Sequence[tuple[float, float]]) -> Floats:
    """The first and the second components, each as an array."""
    return np.array(pairs, float).reshape(-1, 2).T


def _last(values: Sequence[float] | Floats) -> float | None:
    return float(values[-1]) if len(values) else None
