"""Result: what `mh.train` returns, and how it is computed from the lines of a record."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from manyhands.core.lag import LagSummary
from manyhands.core.strategy import Batch, Weights
from manyhands.core.task import Task
from manyhands.splits.data import collate, tensors_of

if TYPE_CHECKING:
    from pandas import DataFrame
    from plotly.graph_objects import Figure

TAIL = 0.05
"""The final loss is the mean over this share of the run, because the loss of one mini-batch is noisy."""


@dataclass(frozen=True, repr=False)
class Result:
    """The outcome of a run.

    `seconds` are virtual in a virtual run, `wall_seconds` are always real. `weights` maps parameter
    names to tensors; it is None in a run of sizes only.
    """

    task: str
    world: str
    workers: int
    servers: int
    steps: int
    seed: int
    seconds: float
    wall_seconds: float
    samples: int
    final_loss: float | None
    test_accuracy: float | None
    bytes_sent: int
    lag: LagSummary
    waited_seconds: float
    weights: Weights | None
    buffers: Weights | None
    weights_sha256: str | None
    records: Sequence[dict[str, Any]]
    record: Path | None
    lost: Sequence[tuple[int, str]]
    stopped_at: int | None = None
    """The step at which a real run was stopped before its end (SIGTERM, Ctrl-C), if it was."""
    record_error: str = ""
    """Why the record on disk is incomplete, as on a full disk, if it is; `records` are complete."""

    @property
    def bytes(self) -> int:
        """Bytes of tensors that all ranks sent."""
        return self.bytes_sent

    @property
    def mean_lag(self) -> float | None:
        """Of the gradients that were applied; None if it is not defined for the method, or not known."""
        return self.lag.mean

    @property
    def max_lag(self) -> int | None:
        return self.lag.max

    @property
    def dropped(self) -> int:
        """How many gradients were dropped."""
        return self.lag.dropped

    @property
    def dropped_mean_lag(self) -> float | None:
        """The mean lag of the dropped gradients; None if there are none."""
        return self.lag.dropped_mean

    @property
    def mean_apart(self) -> float | None:
        """How many versions apart the shards of one read were; None unless several shards were read."""
        return self.lag.apart_mean

    @property
    def max_apart(self) -> int | None:
        return self.lag.apart_max

    @property
    def max_ahead(self) -> int | None:
        """How many clocks a worker was ahead of the slowest when it read; None if clocks are not bounded."""
        return self.lag.ahead_max

    @property
    def memory(self) -> list[dict[str, Any]]:
        """What the tensors of each worker are for, in bytes, by rank (see docs/records.md)."""
        lines = (line for line in self.records if line["kind"] == "memory")
        kept = [{name: value for name, value in line.items() if name != "kind"} for line in lines]
        return sorted(kept, key=lambda line: int(line["held"]))

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.seconds if self.seconds else math.nan

    def __repr__(self) -> str:
        from manyhands.run.display import result_text

        return result_text(self)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from manyhands.run.display import result_html

        return result_html(self)

    def to_pandas(self, kind: str = "step") -> DataFrame:
        """The lines of the record of one kind: "step", "evaluation", "pause" or "memory" (see docs/records.md)."""
        from manyhands.run.display import result_frame

        return result_frame(self, kind)

    def plot(self, over: str = "seconds") -> Figure:
        """Loss and accuracy during the run, over "seconds", "samples" or "bytes", as a figure of plotly."""
        from manyhands.run.display import result_figure

        return result_figure(self, over)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C has stopped a run, which was saved; `result` is what it had reached."""

    def __init__(self, result: Result) -> None:
        folder = None if result.record is None else str(result.record.parent)
        stopped = f"the run was stopped at step {result.stopped_at} and saved: resume={folder!r} continues it"
        super().__init__("the run was complete" if result.stopped_at is None else stopped)
        self.result = result


def final_loss(steps: Sequence[dict[str, Any]]) -> float | None:
    """The mean loss over the last steps (`TAIL`); `steps` are in the order of time."""
    losses = [line["loss"] for line in steps if line["loss"] is not None and math.isfinite(line["loss"])]
    tail = losses[-max(1, round(len(losses) * TAIL)) :]
    return sum(tail) / len(tail) if tail else None


def sha256(weights: Weights) -> str:
    """A digest of names, dtypes, shapes and little-endian bytes, in the model's order."""
    digest = hashlib.sha256()
    for name, x in weights.items():
        digest.update(f"{name}|{x.dtype}|{tuple(x.shape)}|".encode())
        digest.update(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def evaluate(task: Task, weights: Weights, buffers: Weights | None, seed: int) -> float | None:
    """The task's metric on its test data, computed with a new model; None if it has no metric or no test data."""
    if task.metric is None or task.test is None:
        return None
    model = load(task, weights, buffers, seed).eval()
    total, batch = 0.0, 512
    with torch.no_grad():
        for start in range(0, len(task.test), batch):
            fields = _fields(task.test, range(start, min(start + batch, len(task.test))))
            total += task.metric(model(*fields[:-1]), fields[-1]) * len(fields[-1])
    return total / len(task.test)


def _fields(data: Any, rows: range) -> Batch:
    tensors = tensors_of(data)
    return collate([data[i] for i in rows]) if tensors is None else tuple(x[rows.start : rows.stop] for x in tensors)


def load(task: Task, weights: Weights, buffers: Weights | None, seed: int) -> nn.Module:
    """A new model of the task with these weights."""
    model = task.build(seed)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with torch.no_grad():
        for name, x in {**weights, **(buffers or {})}.items():
            state[name].copy_(x)
    return model
