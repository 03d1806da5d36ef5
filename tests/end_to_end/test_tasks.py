"""Our tasks and the user's own are learned by a bulk, a stale and a pipeline method with default knobs."""

import sys
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import mse_loss

import manyhands as mh
from manyhands.tasks import load

from .small import METHODS, losses, task

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


BEYOND = {"bsp": mh.bsp, "ssp": mh.ssp, "diloco": lambda: mh.diloco(period=10)}


@pytest.mark.parametrize("method", BEYOND)
def test_a_machine_without_a_loss_learns_to_see(method):
    result = mh.train("rbm", BEYOND[method](), cluster=mh.Cluster(workers=2), epochs=6)
    blind = max(0.5, losses(result)[0] / 8)
    assert result.final_loss < 0.6 * losses(result)[0] < blind * 8
    assert result.test_accuracy > 0.85


@pytest.mark.parametrize("method", BEYOND)
def test_a_network_with_a_memory_learns_to_read(data_dir, method):
    task = replace(load("rnn", data_dir / "text"), test=None)
    result = mh.train(task, BEYOND[method](), cluster=mh.Cluster(workers=2), steps=100)
    assert losses(result)[0] > 3.9
    assert result.final_loss < 3.2


SPARSE = {"bsp": mh.bsp, "ssp": mh.ssp, "hogwild": mh.hogwild, "hogbatch": mh.hogbatch, "hybrid": mh.hybrid}


@pytest.mark.parametrize("method", SPARSE)
def test_a_million_features_speak_for_a_label(method):
    result = mh.train("sparse", SPARSE[method](lr=0.5), cluster=mh.Cluster(workers=2), steps=200)
    assert losses(result)[0] == pytest.approx(0.6931, abs=1e-4), "at first nobody has an opinion"
    assert result.final_loss < 0.66
    assert result.test_accuracy > 0.7


def by_hand(model, x, y):
    """The gradient of an ordinary loss, as if there were no other way to get it."""
    with torch.enable_grad():
        loss = mse_loss(model(x), y)
        names, parameters = zip(*model.named_parameters(), strict=True)
        return loss.detach(), dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


@pytest.mark.parametrize("method", [name for name in METHODS if name not in ("gpipe", "pipedream")])
def test_a_gradient_that_is_handed_over_is_as_good_as_a_loss(method):
    runs = [mh.train(given, METHODS[method](), steps=6).weights_sha256 for given in (small(), small(None, by_hand))]
    assert runs[0] == runs[1]


def small(loss=mse_loss, gradient=None):
    return replace(task(), loss=loss, gradient=gradient)


def test_a_gradient_for_nothing_is_refused_by_name():
    def misnamed(model, x, y):
        return torch.ones(()), {"0.wieght": torch.zeros(8, 4)}

    with pytest.raises(mh.Refused, match=r"no parameter '0\.wieght': did you mean 0\.weight"):
        mh.train(small(None, misnamed), mh.bsp(), steps=1)


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


def test_your_own_task_needs_a_place_to_cut_for_each_stage(tmp_path, monkeypatch):
    (tmp_path / "moons.py").write_text(YOURS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "moons", raising=False)
    with pytest.raises(mh.Refused, match="the number of stages is 4, but must be <= 2, into which"):
        mh.train("moons:whole", mh.pipedream(), cluster=mh.Cluster(4))
