"""Our tasks and the user's own are learned by a bulk, a stale and a pipeline method with default knobs."""

import sys
from dataclasses import replace

import pytest

import manyhands as mh
from manyhands.tasks import load

from .small import METHODS, losses

YOURS = '''
"""Which of two moons is a point on?"""
import torch
from torch import nn
from torch.nn.functional import cross_entropy
import manyhands as mh


class Moons:
    """A map-style data set without tensors of its own."""

    def __len__(self):
        return 200

    def __getitem__(self, i):
        angle = torch.tensor(3.14159 * (i // 2) / 100)
        moon = i % 2
        side = 1 - 2 * moon
        return torch.stack([angle.cos() * side + moon, angle.sin() * side + moon / 2]), moon


class Net(nn.Module):
    """Not a Sequential, and it knows its own loss."""

    def __init__(self):
        super().__init__()
        self.hidden, self.out = nn.Linear(2, 16), nn.Linear(16, 2)

    def forward(self, x, y):
        return cross_entropy(self.out(torch.tanh(self.hidden(x))), y)


def whole():
    return mh.Task(model=Net, data=Moons(), batch_size=16, name="moons")


def cut():
    hidden = lambda: [layer for inputs in (2, 16, 16) for layer in (nn.Linear(inputs, 16), nn.Tanh())]
    model = lambda: nn.Sequential(*hidden(), nn.Linear(16, 2))
    return mh.Task(model=model, data=Moons(), loss=cross_entropy, batch_size=16, name="moons in layers")
'''


def halves(result):
    first = losses(result)[0]
    return result.final_loss <= first / 2


@pytest.mark.parametrize(("method", "steps"), [("bsp", 60), ("ssp", 60), ("gpipe", 150)])
def test_mnist(data_dir, method, steps):
    task = load("mnist", data_dir / "mnist")
    result = mh.train(task, METHODS[method](), steps=steps)
    assert halves(result)
    assert result.test_accuracy > 0.7


@pytest.mark.parametrize(("method", "steps"), [("bsp", 150), ("ssp", 200), ("gpipe", 500)])
def test_text(data_dir, method, steps):
    task = replace(load("text", data_dir / "text"), test=None)
    result = mh.train(task, METHODS[method](), steps=steps)
    assert losses(result)[0] > 3.9, "at first any of some sixty characters is as likely"
    assert result.final_loss < 2.8


@pytest.mark.parametrize("method", ["bsp", "ssp", "gpipe"])
def test_regression(method):
    result = mh.train("regression", METHODS[method](), steps=150)
    assert halves(result)


@pytest.mark.parametrize(("function", "method"), [("whole", "bsp"), ("whole", "ssp"), ("cut", "bsp"), ("cut", "gpipe")])
def test_a_task_of_your_own(tmp_path, monkeypatch, function, method):
    (tmp_path / "moons.py").write_text(YOURS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "moons", raising=False)
    result = mh.train(f"moons:{function}", METHODS[method](), steps=200)
    assert result.task.startswith("moons")
    assert halves(result)


def test_your_own_task_must_be_a_chain_for_a_pipeline(tmp_path, monkeypatch):
    (tmp_path / "moons.py").write_text(YOURS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "moons", raising=False)
    with pytest.raises(mh.Refused, match=r"the model is a Net, but a pipeline needs an nn\.Sequential"):
        mh.train("moons:whole", mh.gpipe())
