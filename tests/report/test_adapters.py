"""Adapters send the record to other tools, and never stop a run."""

import logging
import sys
from types import SimpleNamespace

import pytest

import manyhands as mh
from manyhands.core.errors import Refused
from manyhands.report.adapters import adapters
from manyhands.report.record import Record
from synthetic_runs import lines


class Calls(list):
    """Everything that was asked of a fake."""

    def writer(self, fails=""):
        calls = self

        class SummaryWriter:
            def __init__(self, log_dir):
                calls.append(("open", log_dir))
                if fails == "open":
                    raise OSError("no space")

            def add_scalar(self, name, value, step):
                calls.append((name, value, step))
                if fails == "write":
                    raise ValueError("bad weather")

            def close(self):
                calls.append(("close",))
                if fails == "close":
                    raise SystemExit(3)

        return SimpleNamespace(SummaryWriter=SummaryWriter)

    def client(self):
        calls = self

        class MlflowClient:
            def get_experiment_by_name(self, name):
                return None

            def create_experiment(self, name):
                return "7"

            def create_run(self, experiment, run_name):
                calls.append(("run", experiment, run_name))
                return SimpleNamespace(info=SimpleNamespace(run_id="abc"))

            def log_param(self, run, name, value):
                calls.append(("param", name, value))

            def log_batch(self, run, metrics):
                calls.extend(metrics)

            def set_terminated(self, run, status):
                calls.append(("end", run, status))

        return SimpleNamespace(MlflowClient=MlflowClient)


@pytest.fixture
def calls():
    return Calls()


def recorded(names, folder, some=None):
    with Record(None, also=adapters(names, folder)) as record:
        for line in some or lines(8, evaluate_every=1):
            record.write(line)
    return record


def test_tensorboard_gets_scalars_by_samples(monkeypatch, tmp_path, calls):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", calls.writer())
    record = recorded(["tensorboard"], tmp_path)
    steps = [line for line in record.lines if line["kind"] == "step"]
    assert calls[0] == ("open", str(tmp_path / "tensorboard"))
    assert calls[-1] == ("close",)
    assert [call[1:] for call in calls if call[0] == "loss"] == [(s["loss"], 32 * n) for n, s in enumerate(steps, 1)]
    assert {call[0] for call in calls[1:-1]} == {
        *("loss", "accuracy", "bytes", "lag", "wait"),
        *(f"compute/rank{rank}" for rank in range(4)),
    }
    assert [call for call in calls if call[0] == "accuracy"][-1] == ("accuracy", 0.97, 256)
    assert [call for call in calls if call[0] == "bytes"][-1] == ("bytes", 8000, 256)


@pytest.mark.parametrize(("end", "status"), [({}, "FINISHED"), ({"error": "it died"}, "FAILED")])
def test_mlflow_gets_settings_and_metrics(monkeypatch, tmp_path, calls, end, status):
    monkeypatch.setitem(sys.modules, "mlflow", calls.client())
    metric = SimpleNamespace(Metric=lambda name, value, at, step: (name, value, step))
    monkeypatch.setitem(sys.modules, "mlflow.entities", metric)
    record = recorded(["mlflow"], tmp_path / "mine", lines(8, evaluate_every=1, end=end))
    steps = [line for line in record.lines if line["kind"] == "step"]
    assert calls[0] == ("run", "7", "mine")
    assert ("param", "method", "ssp:staleness=3") in calls
    assert [call[1:] for call in calls if call[0] == "loss"] == [(s["loss"], 32 * n) for n, s in enumerate(steps, 1)]
    assert calls[-1] == ("end", "abc", status)


@pytest.mark.parametrize(("name", "module"), [("tensorboard", "torch.utils.tensorboard"), ("mlflow", "mlflow")])
def test_absent_ones_are_reported_once(monkeypatch, caplog, name, module):
    monkeypatch.setitem(sys.modules, module, None)
    with caplog.at_level(logging.WARNING, "manyhands"):
        record = recorded([name], None)
    assert len(caplog.records) == 1
    assert f"{name} is not installed, the run continues without it" in caplog.text
    assert len(record.lines) > 8


@pytest.mark.parametrize("where", ["open", "write", "close"])
def test_failing_ones_are_reported_once_and_disabled(monkeypatch, caplog, calls, where):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", calls.writer(fails=where))
    with caplog.at_level(logging.WARNING, "manyhands"):
        recorded(["tensorboard"], None)
    assert len(caplog.records) == 1
    assert "tensorboard failed, the run continues without it" in caplog.text
    assert len(calls) == {"open": 1, "write": 2}.get(where, len(calls))


def test_unknown_ones_are_refused():
    with pytest.raises(Refused, match="there is no adapter 'tensorbord': did you mean tensorboard"):
        adapters(["tensorbord"], None)


def test_a_run_sends_them_its_lines(monkeypatch, caplog, calls):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", calls.writer(fails="write"))
    monkeypatch.setitem(sys.modules, "mlflow", None)
    result = mh.train("digits", mh.bsp(), workers=None, steps=2, adapters=["tensorboard", "mlflow"])
    assert result.test_accuracy is not None
    assert len(calls) == 2
    assert [record.message.split()[0] for record in caplog.records] == ["mlflow", "tensorboard"]
