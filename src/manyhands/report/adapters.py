"""Adapters: the lines of a record, sent to TensorBoard or MLflow as well.

They are optional. An adapter whose package is not installed, or that fails in any way, logs one warning and is
disabled: it never stops a run.
"""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from manyhands.core.errors import unknown
from manyhands.core.record import Line
from manyhands.report.record import Listener

log = logging.getLogger("manyhands")


class Scalars:
    """The numbers in the lines of one run, each at the number of samples that the whole job has consumed."""

    def __init__(self) -> None:
        self.header: Line = {}
        self.samples = 0.0
        self._sent: dict[int, int] = {}

    def __call__(self, line: Line) -> Iterator[tuple[str, float]]:
        """The names and values of one line; missing values are left out."""
        if line["kind"] == "header":
            self.header = line
        elif line["kind"] == "step":
            self.samples += line["samples"] * self.header.get("replicas", 1) / self.header.get("workers", 1)
            self._sent[line["rank"]] = line["bytes"]
            found = {"loss": line["loss"], "bytes": sum(self._sent.values()), "lag": line["lag"], "wait": line["wait"]}
            found[f"compute/rank{line['rank']}"] = line["compute"]
            yield from ((name, float(value)) for name, value in found.items() if value is not None)
        elif line["kind"] == "evaluation" and line["accuracy"] is not None:
            yield "accuracy", float(line["accuracy"])
        elif line["kind"] == "numbers":
            yield from ((name, float(value)) for name, value in line["values"].items() if value is not None)
        elif line["kind"] == "end" and line.get("test_accuracy") is not None:
            yield "accuracy", float(line["test_accuracy"])

    @property
    def step(self) -> int:
        return round(self.samples)


class TensorBoard:
    """Scalars in event files, in the folder of the run."""

    def __init__(self, folder: Path | None) -> None:
        writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        self._writer = writer(log_dir=None if folder is None else str(folder / "tensorboard"))
        self._scalars = Scalars()

    def write(self, line: Line) -> None:
        for name, value in self._scalars(line):
            self._writer.add_scalar(name, value, self._scalars.step)

    def close(self) -> None:
        self._writer.close()


class MLflow:
    """A run of MLflow: settings as parameters, scalars as metrics. MLflow's own settings determine the server."""

    NAMED = ("task", "method", "world", "workers", "servers", "seed", "steps", "batch_size")
    FLUSH = 500
    """Metrics that are sent together."""

    def __init__(self, folder: Path | None) -> None:
        module = importlib.import_module("mlflow")
        self._client, self._entity = module.MlflowClient(), importlib.import_module("mlflow.entities")
        experiment = self._client.get_experiment_by_name("manyhands")
        experiment_id = self._client.create_experiment("manyhands") if experiment is None else experiment.experiment_id
        name = None if folder is None else folder.name
        self._run = self._client.create_run(experiment_id, run_name=name).info.run_id
        self._scalars, self._waiting, self._status = Scalars(), list[Any](), "KILLED"

    def write(self, line: Line) -> None:
        for name, value in self._scalars(line):
            now = round(1000 * time.time())
            self._waiting.append(self._entity.Metric(name, value, now, self._scalars.step))
        for name in self.NAMED if line["kind"] == "header" else ():
            self._client.log_param(self._run, name, line.get(name))
        if line["kind"] == "end":
            self._status = "FINISHED" if line.get("error") is None else "FAILED"
        if len(self._waiting) >= self.FLUSH:
            self._flush()

    def _flush(self) -> None:
        self._client.log_batch(self._run, metrics=self._waiting)
        self._waiting = []

    def close(self) -> None:
        self._flush()
        self._client.set_terminated(self._run, status=self._status)


KINDS: Mapping[str, Callable[[Path | None], Listener]] = {"tensorboard": TensorBoard, "mlflow": MLflow}


class Harmless:
    """An adapter that cannot fail the run: its first failure is logged, and it is not called again."""

    def __init__(self, name: str, make: Callable[[], Listener]) -> None:
        self.name = name
        self._adapter: Listener | None = None
        self._try(partial(self._start, make))

    def _start(self, make: Callable[[], Listener]) -> None:
        self._adapter = make()

    def write(self, line: Line) -> None:
        """Pass the line on, unless the adapter is disabled."""
        if (adapter := self._adapter) is not None:
            self._try(lambda: adapter.write(line))

    def close(self) -> None:
        """Close the adapter, unless it is disabled."""
        if (adapter := self._adapter) is not None:
            self._try(adapter.close)
        self._adapter = None

    def _try(self, act: Callable[[], None]) -> None:
        try:
            act()
        except (Exception, SystemExit) as error:
            self._adapter = None
            why = "is not installed" if isinstance(error, ImportError) else "failed"
            log.warning("%s %s, the run continues without it: %s", self.name, why, str(error) or type(error).__name__)


def refuse_unknown(names: Sequence[str]) -> None:
    """Refuse a name that no adapter has."""
    for name in names:
        if name not in KINDS:
            raise unknown("adapter", name, KINDS)


def adapters(names: Sequence[str], folder: Path | None) -> list[Harmless]:
    """The adapters of these names; an unknown name is refused."""
    refuse_unknown(names)
    return [Harmless(name, partial(KINDS[name], folder)) for name in names]
